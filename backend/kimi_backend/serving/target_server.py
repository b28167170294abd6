"""`kimi_target`: the target's runner behind Triton Server. A request launches up to two steps and asks for the reply of
one."""

import dataclasses
import time
from typing import Any

import numpy as np
import torch

from kimi_backend.errors import InvalidRequestError
from kimi_backend.processes import freeze_what_is_loaded
from kimi_backend.runners.hand_over.step_sync import TargetSync
from kimi_backend.runners.load.loading import load_target_runner
from kimi_backend.runners.plan_bounds import check_step_ids
from kimi_backend.runners.target_runner import TargetRunner
from kimi_backend.serving import tensor_names as names
from kimi_backend.serving.aux_sharing import AUTO, offer_aux_buffer
from kimi_backend.serving.runner_server import RunnerServer, read_settings, us_since
from kimi_backend.spec_decode.protocols import Pending
from kimi_backend.types import codec
from kimi_backend.types.plan import RunnerDescription, TargetPlan, TargetReply

_MOST_IN_FLIGHT = 2


class TargetServer(RunnerServer):
    """Answers `kimi_target`'s requests."""

    opens = names.SEMAPHORES

    def __init__(self, runner: TargetRunner, pb_utils: Any, aux_transfer: str = AUTO, *, secret: bytes) -> None:
        """
        Args:
            aux_transfer: the setting of that name.
            secret: what each call carries (`serving.runner_secret`).
        """
        offered = offer_aux_buffer(runner.aux_buffer, aux_transfer, runner.workers)
        super().__init__(runner, pb_utils, dataclasses.replace(runner.describe(), aux_buffer=offered), secret)
        self._target = runner
        self._sync = TargetSync(runner.table, runner.device, runner.workers)
        self._in_flight: dict[int, Pending[TargetReply]] = {}
        """Replies by step, in the order of launches. The oldest has lost its asker when there are more than may be."""

    @classmethod
    def from_model_args(cls, args: dict[str, str]) -> "TargetServer":
        """Read the settings and load the model; raises what makes it unusable, for the operator to read."""
        settings, pb_utils, secret = read_settings(args)
        server = cls(load_target_runner(settings), pb_utils, settings.aux_transfer, secret=secret)
        freeze_what_is_loaded()
        return server

    def close(self) -> None:
        """See `RunnerServer.close`."""
        self._sync.close()
        super().close()

    def _open(self, handle: bytes) -> RunnerDescription:
        return dataclasses.replace(self._description, semaphores=self._sync.open(handle))

    def _step(self, request: Any) -> Any:
        start = time.perf_counter()
        asked_for = self._input(request, names.STEP)
        if asked_for is None:
            raise self._missing(names.STEP, self.opens, names.DESCRIBE)
        step_id = int(asked_for.as_numpy()[0])
        for name in (names.PLAN, names.NEXT_PLAN):
            packed = self._packed(request, name)
            if packed is not None:
                self._launch(codec.decode(TargetPlan, packed))
        pending = self._in_flight.pop(step_id, None)
        if pending is None:
            known = ", ".join(map(str, self._in_flight)) or "none"
            raise InvalidRequestError(f"{names.STEP}: {step_id} given, in flight: {known}")
        reply = pending.wait()
        outputs: dict[str, Any] = {names.REPLY: codec.encode(dataclasses.replace(reply, runner_us=us_since(start)))}
        if names.AUX_HIDDEN_STATES in request.requested_output_names():
            aux = reply.aux.tensor
            outputs[names.AUX_HIDDEN_STATES] = (
                np.zeros((0, 0), dtype=np.uint8) if aux is None else aux.contiguous().view(torch.uint8)
            )
        return self._response(outputs)

    def _launch(self, plan: TargetPlan) -> None:
        check_step_ids(plan)
        self._in_flight[plan.step_id] = self._sync.launch(plan, self._target)
        while len(self._in_flight) > _MOST_IN_FLIGHT:
            del self._in_flight[next(iter(self._in_flight))]
