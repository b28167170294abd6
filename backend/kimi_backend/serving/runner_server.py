"""A model runner behind Triton Server: one request is one step, or asks for the runner's description."""

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import InvalidRequestError
from kimi_backend.runners.plan_bounds import check_hand_over
from kimi_backend.runners.ranks.peers import NO_PEERS
from kimi_backend.serving import tensor_names as names
from kimi_backend.serving.aux_sides import AUTO, AuxReceiver, offer_aux_buffer
from kimi_backend.serving.board_sides import TargetSide, make_draft_side
from kimi_backend.serving.boundary import error_response, forward_logs
from kimi_backend.serving.descriptions import description_to_json, model_parameters
from kimi_backend.serving.processes import freeze_what_is_loaded
from kimi_backend.serving.runner_secret import Doorkeeper, read_secret
from kimi_backend.serving.steps_in_flight import StepsInFlight
from kimi_backend.spec_decode.protocols import DraftModel, TargetModel, as_following
from kimi_backend.types import codec
from kimi_backend.types.plan import (
    AuxHandle,
    DraftPlan,
    DraftReply,
    DrawnHandle,
    RunnerDescription,
    TargetPlan,
    TokenHandle,
)

logger = logging.getLogger("kimi_backend.serving")

Runner = TargetModel | DraftModel


def load_target(settings: ServingSettings) -> TargetModel:
    """Load the target's checkpoint and make its runner."""
    from kimi_backend.runners.loading import load_target_runner

    return load_target_runner(settings)


def load_draft(settings: ServingSettings) -> DraftModel:
    """Load the draft's checkpoint and make its runner."""
    from kimi_backend.runners.loading import load_draft_runner

    return load_draft_runner(settings)


def _as_torch(tensor: Any) -> torch.Tensor:
    """A server tensor on whichever device it lies, without a copy."""
    if tensor.is_cpu():
        return torch.from_numpy(tensor.as_numpy())
    return torch.utils.dlpack.from_dlpack(tensor)


def _decoded_plan(tensor: Any) -> TargetPlan:
    return codec.decode(TargetPlan, np.ascontiguousarray(tensor.as_numpy()))


def _us_since(start: float) -> int:
    """Microseconds since a time of `perf_counter`."""
    return round(1e6 * (time.perf_counter() - start))


def _device_of(description: RunnerDescription) -> torch.device:
    """The device that a runner of this process computes on."""
    return torch.device("cpu") if description.device == "cpu" else torch.device("cuda", torch.cuda.current_device())


def _nothing_left(plan: DraftPlan, description: RunnerDescription) -> DraftReply:
    """The reply to a step that cannot follow its verify."""
    return DraftReply(
        step_id=plan.step_id,
        runner_epoch=description.runner_epoch,
        seq_status=np.empty(0, np.int32),
        draft_token_ids=np.empty((0, 0), np.int64),
        tokens=TokenHandle(),
    )


def _aux_from_bytes(tensor: torch.Tensor, row_width: int) -> torch.Tensor:
    """[T, bytes] uint8 -> [T, num_aux * hidden_size]: the target sends its compute dtype, float32 or bf16."""
    itemsize = tensor.shape[1] // row_width
    if tensor.shape[1] != itemsize * row_width or itemsize not in (2, 4):
        raise InvalidRequestError(
            f"{names.AUX_HIDDEN_STATES}: rows of {tensor.shape[1]} bytes given, "
            f"{2 * row_width} (bf16) or {4 * row_width} (float32) are allowed"
        )
    return tensor.view(torch.float32 if itemsize == 4 else torch.bfloat16)


class RunnerServer:
    """Answers `kimi_target`'s or `eagle3_draft`'s requests with a runner."""

    def __init__(
        self, runner: Runner, pb_utils: Any, aux_transfer: str = AUTO, *, secret: bytes, has_board: bool = False
    ) -> None:
        """
        Args:
            secret: what each call carries (`serving.runner_secret`).
            aux_transfer: the setting of that name.
            has_board: whether a draft offers its target a board, where it can (`serving.step_board`).
        """
        self._runner = runner
        self._pb = pb_utils
        self._door = Doorkeeper(pb_utils, secret)
        peers = getattr(runner, "peers", NO_PEERS)
        offered = offer_aux_buffer(getattr(runner, "aux_buffer", None), aux_transfer, peers)
        self._description = dataclasses.replace(runner.describe(), process_id=os.getpid(), aux_buffer=offered)
        device = _device_of(self._description)
        self._receiver = AuxReceiver(device, aux_transfer, peers=peers)
        self._steps = StepsInFlight(runner)
        self._target_side = TargetSide(device, peers)
        self._draft_side = make_draft_side(getattr(runner, "left_shape", None), device, peers) if has_board else None
        if self._draft_side is not None:
            self._description = dataclasses.replace(self._description, step_board=self._draft_side.handle)

    @classmethod
    def from_model_args(cls, args: dict[str, str], load: Callable[[ServingSettings], Runner]) -> "RunnerServer":
        """Read the settings and load the model; raises what makes it unusable, for the operator to read."""
        import triton_python_backend_utils as pb_utils

        settings = ServingSettings.from_parameters(model_parameters(args), os.environ)
        forward_logs(pb_utils, settings.log_level)
        has_board = settings.launch_ahead == "true" and settings.step_board == "auto"
        secret = read_secret(os.environ)
        server = cls(load(settings), pb_utils, settings.aux_transfer, secret=secret, has_board=has_board)
        freeze_what_is_loaded()
        return server

    def run(self, requests: list[Any]) -> list[Any]:
        """One response for each request, in order; a bad one fails alone."""
        responses = []
        for request in requests:
            try:
                responses.append(self._respond(request))
            except Exception as error:  # the server needs a response for every request, whatever happened
                responses.append(error_response(self._pb, error))
        return responses

    def close(self) -> None:
        """Give up the runner's child processes and device memory."""
        self._target_side.close()
        if self._draft_side is not None:
            self._draft_side.close()
        self._receiver.close()
        close = getattr(self._runner, "close", None)
        if close is not None:
            close()

    def _respond(self, request: Any) -> Any:
        self._door.check(request)
        plan = self._input(request, names.PLAN)
        if self._input(request, names.DESCRIBE) is not None:
            return self._describe(request)
        if self._description.role == "target":
            step, next_plan = (self._input(request, name) for name in (names.STEP, names.NEXT_PLAN))
            if step is not None or next_plan is not None:
                return self._verify_ahead(plan, step, next_plan)
        if plan is None:
            raise InvalidRequestError(f"one of the inputs {names.PLAN} and {names.DESCRIBE} is needed, none was given")
        buffer = np.ascontiguousarray(plan.as_numpy())
        if self._description.role == "target":
            return self._verify(buffer, names.AUX_HIDDEN_STATES in request.requested_output_names())
        return self._propose(buffer, self._input(request, names.AUX_HIDDEN_STATES))

    def _input(self, request: Any, name: str) -> Any | None:
        return self._pb.get_input_tensor_by_name(request, name)

    def _describe(self, request: Any) -> Any:
        """The description; each opens before what the other offers, and says what is open."""
        description = self._description
        if description.role == "target":
            handle = self._input(request, names.STEP_BOARD)
            opened = self._target_side.open(None if handle is None else handle.as_numpy().tobytes())
            description = dataclasses.replace(description, step_board=opened)
        if description.role == "draft":
            handle = self._input(request, names.AUX_BUFFER)
            opened = self._receiver.open(None if handle is None else handle.as_numpy().tobytes())
            description = dataclasses.replace(description, aux_buffer=opened)
        return self._response({names.DESCRIPTION: description_to_json(description)})

    def _verify(self, buffer: codec.Buffer, wants_aux_tensor: bool) -> Any:
        """wants_aux_tensor: off where the draft reads the buffer itself; a tensor that nobody asked for costs too."""
        runner: Any = self._runner
        start = time.perf_counter()
        plan = codec.decode(TargetPlan, buffer)
        check_hand_over(plan, self._description.max_num_seqs)
        reply = self._target_side.verify(plan, runner)
        outputs: dict[str, Any] = {names.REPLY: codec.encode(dataclasses.replace(reply, runner_us=_us_since(start)))}
        if wants_aux_tensor:
            aux = reply.aux.tensor
            outputs[names.AUX_HIDDEN_STATES] = (
                np.zeros((0, 0), dtype=np.uint8) if aux is None else aux.contiguous().view(torch.uint8)
            )
        return self._response(outputs)

    def _verify_ahead(self, plan: Any | None, step: Any | None, next_plan: Any | None) -> Any:
        """Launch the next step, if it is there, and reply to the one before it: its plan, or its id where it was the
        next one of an earlier request."""
        if (plan is None) == (step is None):
            given = "none" if plan is None else "both"
            raise InvalidRequestError(
                f"one of the inputs {names.PLAN} and {names.STEP} is needed beside {names.NEXT_PLAN}, {given} given"
            )
        start = time.perf_counter()
        behind = None if next_plan is None else _decoded_plan(next_plan)
        if step is not None:
            reply = self._steps.go_on(int(step.as_numpy()[0]), behind)
        else:
            reply = self._steps.begin(_decoded_plan(plan), behind)
        return self._response({names.REPLY: codec.encode(dataclasses.replace(reply, runner_us=_us_since(start)))})

    def _propose(self, buffer: codec.Buffer, aux: Any | None) -> Any:
        start = time.perf_counter()
        plan = codec.decode(DraftPlan, buffer)
        if aux is not None:
            width = self._description.hidden_size * len(self._description.aux_layer_ids)
            tensor = _aux_from_bytes(_as_torch(aux), width)
        else:
            # What the step reads of it: whoever copies the tensor need not copy a region.
            tensor = self._receiver.resolve(plan.aux, max(int(plan.aux_rows.max(initial=-1)), 0) + 1)
        # A tensor of the server's is gone when this has answered, so a step that reads one is waited for.
        leaves_tokens = plan.leaves_tokens and self._draft_side is not None and aux is None
        handle = AuxHandle(tensor=tensor, region=None if aux is not None else plan.aux.region)
        plan = dataclasses.replace(plan, aux=handle, leaves_tokens=leaves_tokens)
        reply = self._draft(plan)
        return self._response({names.REPLY: codec.encode(dataclasses.replace(reply, runner_us=_us_since(start)))})

    def _draft(self, plan: DraftPlan) -> DraftReply:
        """Run a draft step. One that should follow a verify and cannot leaves nothing."""
        side, runner, follow = self._draft_side, self._runner, plan.follow
        assert hasattr(runner, "propose")
        if follow is None:
            return side.leave(lambda: runner.propose(plan)) if side and plan.leaves_tokens else runner.propose(plan)
        following = as_following(runner)
        if side is None or following is None:
            raise InvalidRequestError("plan follow: given, but this draft follows no verify")

        def step(drawn: DrawnHandle) -> DraftReply | None:
            return following.follow(dataclasses.replace(plan, follow=dataclasses.replace(follow, drawn=drawn)))

        # Of several regions nobody knows yet which one the verify takes.
        reply = side.follow(follow.drawn.stamp, step) if self._receiver.num_regions == 1 else None
        return _nothing_left(plan, self._description) if reply is None else reply

    def _response(self, outputs: dict[str, Any]) -> Any:
        tensors = []
        for name, value in outputs.items():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                tensors.append(self._pb.Tensor.from_dlpack(name, value))
            else:
                tensors.append(self._pb.Tensor(name, value.numpy() if isinstance(value, torch.Tensor) else value))
        return self._pb.InferenceResponse(output_tensors=tensors)
