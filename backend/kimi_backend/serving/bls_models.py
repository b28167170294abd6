"""The two model Protocols over Triton Server's in-process calls (BLS): one call a step.

The two share an `AuxTransfer`, which says whether the target's aux hidden states need to travel, and a `BoardTransfer`,
which says whether the runners' steps wait for each other on the GPU. Then the draft that follows a verify is called
beside it, from a second thread: both calls take longer than what has to be done between them.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from kimi_backend.errors import InvalidRequestError, ModelUnavailableError
from kimi_backend.serving import tensor_names as names
from kimi_backend.serving.aux_transfer import AuxTransfer, BoardTransfer
from kimi_backend.serving.descriptions import description_from_json
from kimi_backend.serving.runner_secret import secret_tensor
from kimi_backend.serving.side_thread import SideThread
from kimi_backend.spec_decode.protocols import OnQueued
from kimi_backend.types import codec
from kimi_backend.types.plan import (
    AuxHandle,
    DraftPlan,
    DraftReply,
    DrawnHandle,
    RunnerDescription,
    TargetPlan,
    TargetReply,
)

_ONLY_REGION = 0
"""Of the target's buffer: a verify waits for the draft step that reads the one before."""


class _BlsModel:
    def __init__(
        self,
        pb_utils: Any,
        model_name: str,
        aux_transfer: AuxTransfer,
        board: BoardTransfer | None = None,
        *,
        secret: bytes,
    ) -> None:
        """
        Args:
            board: None where either is always waited for.
            secret: what the model knows its caller by (`serving.runner_secret`).
        """
        self._pb = pb_utils
        self._model_name = model_name
        self._aux_transfer = aux_transfer
        self._board = board or BoardTransfer()
        self._secret = secret_tensor(pb_utils, secret)

    def _describe(self, name: str, to_open: bytes | None) -> RunnerDescription:
        """to_open: the other runner's handle, as the input `name`."""
        inputs = [self._pb.Tensor(names.DESCRIBE, np.ones(1, dtype=np.bool_))]
        if to_open is not None:
            inputs.append(self._pb.Tensor(name, np.frombuffer(to_open, np.uint8)))
        (text,) = self._call(inputs, [names.DESCRIPTION])
        try:
            return description_from_json(text.as_numpy()[0])
        except (InvalidRequestError, ValueError) as error:  # loaded from another version of the code
            raise ModelUnavailableError(f"runner {self._model_name}: {error}") from error

    def _call(self, inputs: list[Any], outputs: list[str]) -> list[Any]:
        """Run one request on the model and return the named outputs, in order.

        Raises:
            ModelUnavailableError: any failure. The engine cannot mend a runner; it can only do without it.
        """
        # No trace is handed on: one of level TENSORS would show the secret, and what is generated.
        request = self._pb.InferenceRequest(
            model_name=self._model_name, requested_output_names=outputs, inputs=[self._secret, *inputs]
        )
        try:
            response = request.exec()
        except self._pb.TritonModelException as error:
            raise ModelUnavailableError(f"runner {self._model_name}: {error}") from error
        if response.has_error():
            raise ModelUnavailableError(f"runner {self._model_name}: {response.error().message()}")
        by_name = {tensor.name(): tensor for tensor in response.output_tensors()}
        missing = [name for name in outputs if name not in by_name]
        if missing:
            raise ModelUnavailableError(f"runner {self._model_name}: reply lacks output {missing[0]}")
        return [by_name[name] for name in outputs]


class BlsTarget(_BlsModel):
    """`TargetModel` and `LaunchingTarget` over `kimi_target`."""

    def describe(self) -> RunnerDescription:
        """See `TargetModel.describe`. The target opens the board that the draft offers."""
        description = self._describe(names.STEP_BOARD, self._board.offered)
        self._board.answer(description.step_board)
        self._aux_transfer.offer(description.aux_buffer)
        return description

    def verify(self, plan: TargetPlan) -> TargetReply:
        """See `TargetModel.verify`."""
        self._open_board()
        return self._verify(dataclasses.replace(plan, draft_step=self._board.draft_step))

    @property
    def can_launch(self) -> bool:
        """See `LaunchingTarget.can_launch`."""
        return self._aux_transfer.is_open and (self._board.is_open or self._board.to_open is not None)

    def verify_ahead(self, plan: TargetPlan, on_queued: OnQueued) -> TargetReply:
        """See `LaunchingTarget.verify_ahead`. on_queued is called on another thread, and has returned when this has."""
        self._open_board()
        if not (self._aux_transfer.is_open and self._board.is_open):
            return self._verify(dataclasses.replace(plan, draft_step=self._board.draft_step))
        stamp = self._board.next_stamp()
        plan = dataclasses.replace(plan, stamp=stamp, draft_step=self._board.draft_step)
        with self._side.running(lambda: on_queued(AuxHandle(region=_ONLY_REGION), DrawnHandle(stamp=stamp))):
            return self._verify(plan)

    @functools.cached_property
    def _side(self) -> SideThread:
        return SideThread("kimi-draft-call")

    def _open_board(self) -> None:
        if self._board.to_open is not None:  # another draft's, or the first one's
            self.describe()

    def _verify(self, plan: TargetPlan) -> TargetReply:
        request = self._pb.Tensor(names.PLAN, codec.encode(plan))
        aux = None
        if self._aux_transfer.is_open:
            (reply,) = self._call([request], [names.REPLY])
        else:
            reply, aux = self._call([request], [names.REPLY, names.AUX_HIDDEN_STATES])
        # The buffer lies in shared memory that goes with the tensor: copy it, a few hundred bytes.
        decoded = codec.decode(TargetReply, reply.as_numpy().copy(), aux=AuxHandle())
        return dataclasses.replace(decoded, aux=AuxHandle(tensor=aux, region=decoded.aux.region))


class BlsDraft(_BlsModel):
    """`DraftModel` and `FollowingDraft` over `eagle3_draft`."""

    def describe(self) -> RunnerDescription:
        """See `DraftModel.describe`. The draft opens the buffer that the target offers."""
        description = self._describe(names.AUX_BUFFER, self._aux_transfer.offered)
        self._aux_transfer.answer(description.aux_buffer)
        self._board.offer(description.step_board)
        return description

    def propose(self, plan: DraftPlan) -> DraftReply:
        """See `DraftModel.propose`. The target's aux tensor, if it came as one, is passed on untouched."""
        if self._aux_transfer.to_open is not None:  # a target that was restarted offers another buffer
            self.describe()
        if plan.leaves_tokens and not self._board.is_open:
            plan = dataclasses.replace(plan, leaves_tokens=False)
        return self._propose(plan)

    def follow(self, plan: DraftPlan) -> DraftReply | None:
        """See `FollowingDraft.follow`."""
        reply = self._propose(plan)
        return reply if reply.tokens.num_seqs else None

    def _propose(self, plan: DraftPlan) -> DraftReply:
        inputs = [self._pb.Tensor(names.PLAN, codec.encode(plan))]
        if plan.aux.tensor is not None:
            inputs.append(plan.aux.tensor)
        (buffer,) = self._call(inputs, [names.REPLY])
        reply = codec.decode(DraftReply, buffer.as_numpy().copy())
        if reply.tokens.region is not None:
            self._board.draft_step = reply.tokens.region
        return reply
