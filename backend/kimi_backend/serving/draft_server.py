"""`eagle3_draft`: the draft's runner behind Triton Server. A request is one step, answered when it is queued where its
tokens are left in the token table."""

import dataclasses
import time
from typing import Any

import torch
import torch.utils.dlpack

from kimi_backend.errors import InvalidRequestError
from kimi_backend.processes import freeze_what_is_loaded
from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.runners.hand_over.step_sync import make_draft_sync
from kimi_backend.runners.load.loading import load_draft_runner
from kimi_backend.runners.plan_bounds import check_step_ids
from kimi_backend.serving import tensor_names as names
from kimi_backend.serving.aux_sharing import AUTO, AuxReceiver
from kimi_backend.serving.runner_server import RunnerServer, read_settings, us_since
from kimi_backend.types import codec
from kimi_backend.types.plan import AuxHandle, DraftPlan, RunnerDescription
from kimi_backend.types.step_costs import StepCosts


class DraftServer(RunnerServer):
    """Answers `eagle3_draft`'s requests."""

    opens = names.AUX_BUFFER

    def __init__(
        self,
        runner: DraftRunner,
        pb_utils: Any,
        aux_transfer: str = AUTO,
        *,
        secret: bytes,
        has_semaphores: bool = False,
    ) -> None:
        """
        Args:
            aux_transfer: the setting of that name.
            secret: what each call carries (`serving.runner_secret`).
            has_semaphores: whether it offers its target semaphores, where it can (`runners.hand_over.semaphores`).
        """
        self._sync = make_draft_sync(runner.table, runner.device, runner.workers) if has_semaphores else None
        semaphores = None if self._sync is None else self._sync.handle
        super().__init__(runner, pb_utils, dataclasses.replace(runner.describe(), semaphores=semaphores), secret)
        self._draft = runner
        self._most_rows = self._description.max_num_batched_tokens
        self._receiver = AuxReceiver(runner.device, aux_transfer, workers=runner.workers)

    @classmethod
    def from_model_args(cls, args: dict[str, str]) -> "DraftServer":
        """Read the settings and load the model; raises what makes it unusable, for the operator to read."""
        settings, pb_utils, secret = read_settings(args)
        has_semaphores = settings.async_scheduling == "true" and settings.shared_semaphores == "auto"
        runner = load_draft_runner(settings)
        server = cls(runner, pb_utils, settings.aux_transfer, secret=secret, has_semaphores=has_semaphores)
        freeze_what_is_loaded()
        return server

    def close(self) -> None:
        """See `RunnerServer.close`."""
        if self._sync is not None:
            self._sync.close()
        self._receiver.close()
        super().close()

    def _measure_costs(self) -> StepCosts:
        if self._receiver.num_regions:
            region = AuxHandle(region=0)
            self._draft.timing_aux = AuxHandle(tensor=self._receiver.resolve(region, self._most_rows), region=0)
        try:
            return super()._measure_costs()
        finally:
            self._draft.timing_aux = None

    def _open(self, handle: bytes) -> RunnerDescription:
        return dataclasses.replace(self._description, aux_buffer=self._receiver.open(handle))

    def _step(self, request: Any) -> Any:
        start = time.perf_counter()
        packed = self._packed(request, names.PLAN)
        if packed is None:
            raise self._missing(names.PLAN, self.opens, names.DESCRIBE)
        plan = codec.decode(DraftPlan, packed)
        check_step_ids(plan)
        plan = dataclasses.replace(plan, aux=self._aux(plan, self._input(request, names.AUX_HIDDEN_STATES)))
        if self._sync is not None:
            reply = self._sync.launch(plan, self._draft).wait()
        elif plan.in_table or plan.num_drawn.any():
            raise InvalidRequestError("plan: tokens of the token table wanted, but this draft shares none")
        else:
            reply = self._draft.launch(plan).wait()
        return self._response({names.REPLY: codec.encode(dataclasses.replace(reply, runner_us=us_since(start)))})

    def _aux(self, plan: DraftPlan, sent: Any | None) -> AuxHandle:
        """Return what the step reads: the tensor that was sent, or the region of the open buffer; whoever
        copies the tensor need not copy a region."""
        if sent is None:
            num_rows = max(int(plan.aux_rows.max(initial=-1)), 0) + 1
            return AuxHandle(tensor=self._receiver.resolve(plan.aux, num_rows), region=plan.aux.region)
        if plan.in_table:
            raise InvalidRequestError(
                f"{names.AUX_HIDDEN_STATES}: given, with tokens to be left in the token table: a step that nobody waits"
                " for must not read a tensor that goes with its request"
            )
        width = self._description.hidden_size * len(self._description.aux_layer_ids)
        return AuxHandle(tensor=_aux_from_bytes(_as_torch(sent), width))


def _as_torch(tensor: Any) -> torch.Tensor:
    """A server tensor on whichever device it lies, without a copy."""
    if tensor.is_cpu():
        return torch.from_numpy(tensor.as_numpy())
    return torch.utils.dlpack.from_dlpack(tensor)


def _aux_from_bytes(tensor: torch.Tensor, row_width: int) -> torch.Tensor:
    """[T, bytes] uint8 -> [T, num_aux * hidden_size]: the target sends its compute dtype, float32 or bf16."""
    itemsize = tensor.shape[1] // row_width
    if tensor.shape[1] != itemsize * row_width or itemsize not in (2, 4):
        raise InvalidRequestError(
            f"{names.AUX_HIDDEN_STATES}: rows of {tensor.shape[1]} bytes given, "
            f"{2 * row_width} (bf16) or {4 * row_width} (float32) are allowed"
        )
    return tensor.view(torch.float32 if itemsize == 4 else torch.bfloat16)
