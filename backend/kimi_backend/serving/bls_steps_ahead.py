"""`QueueingTarget` over Triton Server's calls: a round's one call carries the step behind and asks for the reply of the
step before, so the device has the next step queued while replies and requests are on their way."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from kimi_backend.serving import tensor_names as names
from kimi_backend.serving.bls_models import BlsTarget
from kimi_backend.types import codec
from kimi_backend.types.plan import AuxHandle, RunnerDescription, TargetPlan, TargetReply


@dataclasses.dataclass(slots=True, eq=False)
class BlsPending:
    """A step that goes to the target with the next call, or has gone with an earlier one."""

    target: "QueueingBlsTarget"
    plan: TargetPlan
    is_launched: bool = False

    def wait(self) -> TargetReply:
        """See `PendingVerify.wait`."""
        return self.target.wait_for(self)


class QueueingBlsTarget(BlsTarget):
    """Launches nothing at once: what was launched since the last call goes with the next one."""

    _queues = False
    _unsent: Sequence[BlsPending] = ()
    _last_reply: TargetReply | None = None

    def describe(self) -> RunnerDescription:
        """See `TargetModel.describe`."""
        description = super().describe()
        self._queues = description.queues_steps
        return description

    def launch(self, plan: TargetPlan) -> BlsPending | None:
        """See `QueueingTarget.launch`."""
        if not self._queues:
            return None
        pending = BlsPending(self, plan)
        behind = () if plan.drawn_rows is None else self._unsent
        self._unsent = (*behind, pending)
        return pending

    def wait_for(self, pending: BlsPending) -> TargetReply:
        """The reply of a step; the target launches what was launched here meanwhile.

        Raises:
            ModelUnavailableError: as `verify`; also of a target that does not know the step, being another one.
        """
        behind = next((step for step in self._unsent if step is not pending), None)
        self._unsent = ()
        inputs = [self._of_step(pending)]
        if behind is not None:
            inputs.append(self._pb.Tensor(names.NEXT_PLAN, codec.encode(behind.plan)))
        (encoded,) = self._call(inputs, [names.REPLY])
        reply = codec.decode(TargetReply, encoded.as_numpy().copy(), aux=AuxHandle())
        if behind is not None:
            behind.is_launched = reply.launched_next
        self._last_reply = reply
        return reply

    def _of_step(self, pending: BlsPending) -> Any:
        """What names the step: its id, if the target has it; else its plan, with the tokens that are known by now."""
        plan = pending.plan
        if pending.is_launched:
            return self._pb.Tensor(names.STEP, np.array([plan.step_id], np.int64))
        if plan.drawn_rows is not None:
            assert self._last_reply is not None
            drawn = self._last_reply.output_token_ids[plan.drawn_rows, 0]
            token_ids = np.maximum(drawn, 0).astype(np.int32)  # of a sequence that has failed any token will do
            plan = dataclasses.replace(plan, rows=dataclasses.replace(plan.rows, token_ids=token_ids), drawn_rows=None)
        return self._pb.Tensor(names.PLAN, codec.encode(plan))
