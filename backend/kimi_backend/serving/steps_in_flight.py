"""The target's side of steps that one request launches and a later one asks for."""

import dataclasses
from typing import Any

from kimi_backend.errors import InvalidRequestError
from kimi_backend.spec_decode.protocols import PendingVerify, QueueingTarget, TargetModel, as_queueing
from kimi_backend.types.plan import TargetPlan, TargetReply


class StepsInFlight:
    """Of one runner."""

    def __init__(self, runner: Any) -> None:
        self._runner: TargetModel = runner
        self._queueing: QueueingTarget | None = as_queueing(runner)
        self._pending: dict[int, PendingVerify] = {}

    def begin(self, plan: TargetPlan, next_plan: TargetPlan | None) -> TargetReply:
        """Run a step whose tokens the plan has, and launch the one behind it.

        Whatever was in flight has lost its asker.
        """
        self._pending.clear()
        pending = None if self._queueing is None else self._queueing.launch(plan)
        if pending is None:
            return self._runner.verify(plan)
        return self._finish(pending, next_plan)

    def go_on(self, step_id: int, next_plan: TargetPlan | None) -> TargetReply:
        """The reply of a step that an earlier request launched; the one behind it is launched first.

        Raises:
            InvalidRequestError: no request did.
        """
        pending = self._pending.pop(step_id, None)
        if pending is None:
            known = ", ".join(map(str, self._pending)) or "none"
            raise InvalidRequestError(f"STEP: {step_id} given, in flight: {known}")
        return self._finish(pending, next_plan)

    def _finish(self, pending: PendingVerify, next_plan: TargetPlan | None) -> TargetReply:
        behind = None
        if next_plan is not None and self._queueing is not None:
            behind = self._queueing.launch(next_plan)
            if behind is not None:
                self._pending[next_plan.step_id] = behind
        return dataclasses.replace(pending.wait(), launched_next=behind is not None)
