"""The two models' Protocols over Triton Server's in-process calls (BLS): one call a step.

A target's steps are sent with the call that waits for a reply: so one call a round carries the next step and takes the
reply of the one before. A draft's step is sent from a thread of its own when it is launched: with a verify in flight
both calls are under way at once. The two models share an `AuxTransfer` and a `SemaphoreTransfer`, which say what of
each other's memory the runners have opened.
"""

import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from kimi_backend.errors import InvalidRequestError, ModelUnavailableError
from kimi_backend.serving import tensor_names as names
from kimi_backend.serving.aux_transfer import AuxTransfer, SemaphoreTransfer
from kimi_backend.serving.descriptions import description_from_json
from kimi_backend.serving.runner_secret import secret_tensor
from kimi_backend.types import codec
from kimi_backend.types.plan import (
    AuxHandle,
    DraftPlan,
    DraftReply,
    RunnerDescription,
    TargetPlan,
    TargetReply,
)
from kimi_backend.types.step_costs import StepCosts


class _BlsModel:
    def __init__(
        self,
        pb_utils: Any,
        model_name: str,
        aux_transfer: AuxTransfer,
        semaphores: SemaphoreTransfer | None = None,
        *,
        secret: bytes,
    ) -> None:
        """
        Args:
            semaphores: None where either model is always waited for.
            secret: what the model knows its caller by (`serving.runner_secret`).
        """
        self._pb = pb_utils
        self._model_name = model_name
        self._aux_transfer = aux_transfer
        self._semaphores = semaphores or SemaphoreTransfer()
        self._secret = secret_tensor(pb_utils, secret)

    def _describe(self) -> RunnerDescription:
        return self._description([self._pb.Tensor(names.DESCRIBE, np.ones(1, dtype=np.bool_))])

    def measure_costs(self) -> StepCosts:
        """See `Target.measure_costs`."""
        (text,) = self._call([self._pb.Tensor(names.TIME_STEPS, np.ones(1, dtype=np.bool_))], [names.STEP_COSTS])
        try:
            return StepCosts.from_json(text.as_numpy()[0])
        except InvalidRequestError as error:
            raise ModelUnavailableError(f"runner {self._model_name}: {error}") from error

    def _opened(self, name: str, handle: bytes) -> RunnerDescription:
        """The description of a model that was given the other's handle, as the input `name`. It says what is open."""
        return self._description([self._pb.Tensor(name, np.frombuffer(handle, np.uint8))])

    def _description(self, inputs: list[Any]) -> RunnerDescription:
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


@dataclasses.dataclass(frozen=True, slots=True)
class _UnsentStep:
    """A step of the target that goes with the next call, or has gone with an earlier one."""

    target: "BlsTarget"
    step_id: int

    def wait(self) -> TargetReply:
        """See `Pending.wait`."""
        return self.target.wait_for(self.step_id)


class BlsTarget(_BlsModel):
    """`Target` over `kimi_target`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """See `_BlsModel`."""
        super().__init__(*args, **options)
        self.depth = 0
        """See `Target.depth`."""
        self._unsent: list[TargetPlan] = []
        self._semaphores.opener = lambda handle: self._opened(names.SEMAPHORES, handle).semaphores

    def describe(self) -> RunnerDescription:
        """See `Target.describe`."""
        description = self._describe()
        self.depth, self._unsent = description.depth, []
        self._aux_transfer.offer(description.aux_buffer)
        self._semaphores.forget()
        return description

    def launch(self, plan: TargetPlan) -> _UnsentStep:
        """See `Target.launch`. Nothing is sent before somebody waits, but what the runners share is opened."""
        self._semaphores.open()
        self._aux_transfer.open()
        self._unsent.append(plan)
        return _UnsentStep(self, plan.step_id)

    def wait_for(self, step_id: int) -> TargetReply:
        """The reply of a step; the target launches what was launched here meanwhile.

        Raises:
            ModelUnavailableError: also of a target that does not know the step, being another one.
        """
        unsent, self._unsent = self._unsent, []
        inputs = [
            self._pb.Tensor(name, codec.encode(plan))
            for name, plan in zip((names.PLAN, names.NEXT_PLAN), unsent, strict=False)
        ]
        inputs.append(self._pb.Tensor(names.STEP, np.array([step_id], np.int64)))
        aux = None
        # One that is read in place does not travel; of a step that another one is behind, nobody reads any.
        if self._aux_transfer.is_open or len(unsent) != 1 or unsent[0].step_id != step_id:
            (reply,) = self._call(inputs, [names.REPLY])
        else:
            reply, aux = self._call(inputs, [names.REPLY, names.AUX_HIDDEN_STATES])
        # The buffer lies in shared memory that goes with the tensor: copy it, a few hundred bytes.
        decoded = codec.decode(TargetReply, reply.as_numpy().copy(), aux=AuxHandle())
        return dataclasses.replace(decoded, aux=AuxHandle(tensor=aux, region=decoded.aux.region))


@dataclasses.dataclass(frozen=True, slots=True)
class _SentStep:
    """A step of the draft that is under way."""

    reply: "Future[DraftReply]"

    def wait(self) -> DraftReply:
        """See `Pending.wait`."""
        return self.reply.result()


class BlsDraft(_BlsModel):
    """`Draft` over `eagle3_draft`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """See `_BlsModel`."""
        super().__init__(*args, **options)
        self._thread = ThreadPoolExecutor(1, "kimi-draft-call")
        self._aux_transfer.opener = lambda handle: self._opened(names.AUX_BUFFER, handle).aux_buffer

    @property
    def depth(self) -> int:
        """See `Draft.depth`."""
        return int(self._aux_transfer.is_open and self._semaphores.is_open)

    def describe(self) -> RunnerDescription:
        """See `Draft.describe`."""
        description = self._describe()
        self._aux_transfer.forget()
        self._semaphores.offer(description.semaphores)
        return description

    def measure_costs(self) -> StepCosts:
        """See `Draft.measure_costs`. With the target's buffer open, as steps will have it."""
        self._aux_transfer.open()
        return super().measure_costs()

    def launch(self, plan: DraftPlan) -> _SentStep:
        """See `Draft.launch`. The target's aux tensor, if it came as one, is passed on untouched."""
        return _SentStep(self._thread.submit(self._run, plan))

    def _run(self, plan: DraftPlan) -> DraftReply:
        inputs = [self._pb.Tensor(names.PLAN, codec.encode(plan))]
        if plan.aux.tensor is not None:
            inputs.append(plan.aux.tensor)
        (buffer,) = self._call(inputs, [names.REPLY])
        return codec.decode(DraftReply, buffer.as_numpy().copy())
