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
from kimi_backend.serving import tensor_names as names
from kimi_backend.serving.aux_sides import AUTO, AuxReceiver, offer_aux_buffer
from kimi_backend.serving.boundary import error_response, forward_logs
from kimi_backend.serving.descriptions import description_to_json, model_parameters
from kimi_backend.serving.processes import freeze_what_is_loaded
from kimi_backend.serving.steps_in_flight import StepsInFlight
from kimi_backend.serving.token_board import TokenReader, TokenWriter
from kimi_backend.spec_decode.protocols import DraftModel, TargetModel
from kimi_backend.types import codec
from kimi_backend.types.plan import AuxHandle, DraftPlan, RunnerDescription, TargetPlan

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


def _aux_from_bytes(tensor: torch.Tensor, row_width: int) -> torch.Tensor:
    """[T, bytes] uint8 -> [T, num_aux * hidden_size]: the target sends its compute dtype, float32 or bf16."""
    itemsize = tensor.shape[1] // row_width
    if tensor.shape[1] != itemsize * row_width or itemsize not in (2, 4):
        raise InvalidRequestError(
            f"{names.AUX_HIDDEN_STATES}: rows of {tensor.shape[1]} bytes given, "
            f"{2 * row_width} (bf16) or {4 * row_width} (float32) are allowed"
        )
    return tensor.view(torch.float32 if itemsize == 4 else torch.bfloat16)


def _make_board(shape: tuple[int, int] | None) -> TokenWriter | None:
    """Where a draft shows tokens that it has not been waited for; None for a runner that leaves none."""
    if shape is None:
        return None
    try:
        return TokenWriter(shape)
    except OSError as error:
        logger.warning("the draft is waited for in its calls: no board for its tokens: %s", error)
        return None


class RunnerServer:
    """Answers `kimi_target`'s or `eagle3_draft`'s requests with a runner."""

    def __init__(self, runner: Runner, pb_utils: Any, aux_transfer: str = AUTO, *, shows_tokens: bool = False) -> None:
        """
        Args:
            aux_transfer: the setting of that name.
            shows_tokens: whether a draft shows its tokens on a board, where it can.
        """
        self._runner = runner
        self._pb = pb_utils
        offered = offer_aux_buffer(getattr(runner, "aux_buffer", None), aux_transfer)
        self._description = dataclasses.replace(runner.describe(), process_id=os.getpid(), aux_buffer=offered)
        self._receiver = AuxReceiver(_device_of(self._description), aux_transfer)
        self._tokens = TokenReader()
        self._steps = StepsInFlight(runner)
        self._board = _make_board(getattr(runner, "left_shape", None)) if shows_tokens else None
        if self._board is not None:
            self._description = dataclasses.replace(self._description, token_board=self._board.handle)

    @classmethod
    def from_model_args(cls, args: dict[str, str], load: Callable[[ServingSettings], Runner]) -> "RunnerServer":
        """Read the settings and load the model; raises what makes it unusable, for the operator to read."""
        import triton_python_backend_utils as pb_utils

        settings = ServingSettings.from_parameters(model_parameters(args), os.environ)
        forward_logs(pb_utils, settings.log_level)
        shows_tokens = settings.token_board == "on"
        server = cls(load(settings), pb_utils, settings.aux_transfer, shows_tokens=shows_tokens)
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
        self._receiver.close()
        if self._board is not None:
            self._board.close()
        close = getattr(self._runner, "close", None)
        if close is not None:
            close()

    def _respond(self, request: Any) -> Any:
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
            handle = self._input(request, names.TOKEN_BOARD)
            opened = self._tokens.open(None if handle is None else handle.as_numpy().tobytes())
            description = dataclasses.replace(description, token_board=opened)
        if description.role == "draft":
            handle = self._input(request, names.AUX_BUFFER)
            opened = self._receiver.open(None if handle is None else handle.as_numpy().tobytes())
            description = dataclasses.replace(description, aux_buffer=opened)
        return self._response({names.DESCRIPTION: description_to_json(description)})

    def _verify(self, buffer: codec.Buffer, wants_aux_tensor: bool) -> Any:
        """wants_aux_tensor: off where the draft reads the buffer itself; a tensor that nobody asked for costs too."""
        assert hasattr(self._runner, "verify")
        start = time.perf_counter()
        plan = codec.decode(TargetPlan, buffer)
        if plan.draft_tokens.num_seqs:
            tokens = self._tokens.take(plan.draft_tokens, int(plan.num_sampled_rows.max()))
            plan = dataclasses.replace(plan, draft_tokens=tokens)
        reply = self._runner.verify(plan)
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
        assert hasattr(self._runner, "propose")
        start = time.perf_counter()
        plan = codec.decode(DraftPlan, buffer)
        if aux is not None:
            width = self._description.hidden_size * len(self._description.aux_layer_ids)
            tensor = _aux_from_bytes(_as_torch(aux), width)
        else:
            # What the step reads of it: whoever copies the tensor need not copy a region.
            tensor = self._receiver.resolve(plan.aux, max(int(plan.aux_rows.max(initial=-1)), 0) + 1)
        leaves_tokens = plan.leaves_tokens and self._board is not None
        plan = dataclasses.replace(plan, aux=AuxHandle(tensor=tensor), leaves_tokens=leaves_tokens)
        reply = self._runner.propose(plan)
        if self._board is not None and reply.tokens.tensor is not None:
            tokens = self._board.post(reply.tokens.tensor, reply.tokens.num_seqs)
            reply = dataclasses.replace(reply, tokens=tokens)
        return self._response({names.REPLY: codec.encode(dataclasses.replace(reply, runner_us=_us_since(start)))})

    def _response(self, outputs: dict[str, Any]) -> Any:
        tensors = []
        for name, value in outputs.items():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                tensors.append(self._pb.Tensor.from_dlpack(name, value))
            else:
                tensors.append(self._pb.Tensor(name, value.numpy() if isinstance(value, torch.Tensor) else value))
        return self._pb.InferenceResponse(output_tensors=tensors)
