"""Steps without speculation that are launched one ahead: the next one embeds the tokens that this one leaves on the
device, and the host reads each step's tokens while the device runs the next (docs/decisions/0016)."""

from dataclasses import dataclass, field

from kimi_backend.cache.kv_manager import SequenceBlocks
from kimi_backend.scheduler.plan_builder import PlanBuilder
from kimi_backend.scheduler.scheduler import Scheduler, StepBatch
from kimi_backend.scheduler.sequence import Sequence
from kimi_backend.spec_decode.protocols import PendingVerify, QueueingTarget
from kimi_backend.types.plan import TargetPlan


@dataclass(slots=True)
class TargetStep:
    """A step of the target, planned or launched."""

    batch: StepBatch
    plan: TargetPlan
    pending: PendingVerify | None = None
    """Set when it was launched; it must be waited for."""
    blocks: list[SequenceBlocks | None] = field(init=False)
    """What each sequence held when the step was planned: one that has left since holds others or none."""

    def __post_init__(self) -> None:
        self.blocks = [sequence.blocks for sequence in self.batch.sequences]

    @property
    def still_there(self) -> list[bool]:
        """Of each sequence: whether the step's token is still its next one. Not so of one that turned out to have ended
        in the step before, or was cancelled or preempted since, started again or not."""
        pairs = zip(self.batch.sequences, self.blocks, strict=True)
        return [blocks is not None and sequence.blocks is blocks for sequence, blocks in pairs]


class StepsAhead:
    """Launches steps of which nothing but tokens is unknown. Changes no sequence but by blocks for its next token."""

    def __init__(self, target: QueueingTarget, scheduler: Scheduler, plans: PlanBuilder) -> None:
        self._target, self._scheduler, self._plans = target, scheduler, plans

    def launch(self, step: TargetStep) -> TargetStep | None:
        """Launch a step, if it may be left in flight, and the one behind it.

        Returns:
            The one behind it; None where that has to wait for this one's results.

        Raises:
            ModelUnavailableError: as `QueueingTarget.launch`.
        """
        batch = step.batch
        if step.pending is None:
            if batch.num_decodes < len(batch.sequences) or batch.num_tokens > len(batch.sequences):
                return None
            if not self._may_be_left(batch.sequences):
                return None
            step.pending = self._target.launch(step.plan)
        return None if step.pending is None else self._launch_behind(step)

    def _launch_behind(self, step: TargetStep) -> TargetStep | None:
        if self._scheduler.may_admit:
            return None
        rows = [
            index
            for index, (sequence, is_there) in enumerate(zip(step.batch.sequences, step.still_there, strict=True))
            if is_there and sequence.num_remaining_tokens > 1
        ]
        sequences = [step.batch.sequences[index] for index in rows]
        if not rows or not self._may_be_left(sequences) or not self._scheduler.take_next_blocks(sequences):
            return None
        plan = self._plans.next_plan(step.plan, sequences, rows)
        pending = self._target.launch(plan)
        if pending is None:
            return None
        return TargetStep(StepBatch(sequences, [1] * len(rows), len(rows)), plan, pending)

    def _may_be_left(self, sequences: list[Sequence]) -> bool:
        """Whether no draft reads what they draw, or is to begin, and no draw depends on the tokens before it."""
        is_drafting = self._scheduler.is_drafting
        return all(
            s.draws_plainly and not s.uses_draft and not (is_drafting and s.wants_draft and s.speculation.uses_draft)
            for s in sequences
        )
