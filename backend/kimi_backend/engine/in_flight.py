"""Steps that are launched and not waited for yet, and which may be: the engine's only rule on overlap.

A step's depth says how many steps of the target may be in flight with it. 2: its sequences draw one token each, which
the next step reads on the device. 1: the draft is launched behind it, before anybody knows what was accepted; the
next step waits for the draft's reply too where a sequence has a grammar, whose masks depend on the proposals. 0: its
reply is waited for first (docs/decisions/0016).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kimi_backend.cache.kv_manager import SequenceBlocks
from kimi_backend.engine.host_drafts import HostDrafts
from kimi_backend.scheduler.plan_builder import PlanBuilder
from kimi_backend.scheduler.scheduler import Scheduler, StepBatch
from kimi_backend.scheduler.sequence import Sequence
from kimi_backend.spec_decode.protocols import Draft, Pending, Target
from kimi_backend.spec_decode.round_times import Round
from kimi_backend.spec_decode.step_times import StepShape
from kimi_backend.types.plan import DraftPlan, DraftReply, Int32Array, TargetPlan, TargetReply


def _held(sequences: list[Sequence]) -> list[SequenceBlocks | None]:
    """Note the blocks that each holds now: one that leaves holds others or none afterwards."""
    return [sequence.blocks for sequence in sequences]


@dataclass(slots=True)
class DraftStep:
    """A step of the draft."""

    plan: DraftPlan
    index: list[int]
    """[S] where the plan's sequences stand in the verify before it."""
    sequences: list[Sequence]
    pending: Pending[DraftReply]
    blocks: list[SequenceBlocks | None] = field(init=False)
    num_rows: list[int] = field(default_factory=list)
    """[S] rows that count, once it is known what was accepted."""

    def __post_init__(self) -> None:
        self.blocks = _held(self.sequences)

    def still_there(self) -> Iterator[tuple[int, Sequence]]:
        """Those that have run on since with their draft, and where they stand in the plan."""
        for index, (sequence, blocks) in enumerate(zip(self.sequences, self.blocks, strict=True)):
            if blocks is not None and sequence.blocks is blocks and sequence.uses_draft:
                yield index, sequence

    def count(self, num_accepted: Int32Array) -> Int32Array:
        """The number of proposals, [S], now that it is known how many draft tokens were accepted, [S]."""
        plan = self.plan
        checked = np.maximum(plan.num_drawn - 1, 0)
        accepted = np.minimum(num_accepted, checked)
        self.num_rows = (plan.rows.query_lens - checked + accepted).tolist()
        counts: Int32Array = np.maximum(np.minimum(plan.num_proposals, plan.room - accepted), 0)
        return counts


@dataclass(slots=True)
class Step:
    """A step of the target."""

    batch: StepBatch
    plan: TargetPlan
    depth: int
    is_behind: bool = False
    """True if it was planned while the step before it was in flight."""
    read: DraftStep | None = None
    """The draft step whose status comes with its reply."""
    pending: Pending[TargetReply] | None = None
    draft: DraftStep | None = None
    """The draft step behind it, where that was launched before this one was done."""
    blocks: list[SequenceBlocks | None] = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = _held(self.batch.sequences)

    @property
    def still_there(self) -> list[bool]:
        """[S] whether the step's tokens are still the sequence's next ones. Not so of one that turned out to have ended
        in the step before, or was cancelled or preempted since, started again or not."""
        pairs = zip(self.batch.sequences, self.blocks, strict=True)
        return [blocks is not None and sequence.blocks is blocks for sequence, blocks in pairs]

    def round(
        self, total_s: float, target_s: float, draft_s: float, draft_wait_s: float, *, is_overlapped: bool
    ) -> Round:
        """Time the step and the draft's beside it. Where they overlap, the device has run the draft's step that
        this one reads in the same time, and not the one behind it."""
        draft = self.read if is_overlapped else self.draft
        return Round(
            target=StepShape.of(self.plan.rows),
            draft=None if draft is None else StepShape.of(draft.plan.rows, int(draft.plan.num_wanted.max())),
            total_s=total_s,
            target_s=target_s,
            draft_s=draft_s,
            draft_wait_s=draft_wait_s,
            is_overlapped=is_overlapped,
        )


class StepPlanner:
    """Plans the next step, behind what is in flight where that may be."""

    def __init__(
        self, target: Target, draft: Draft | None, scheduler: Scheduler, plans: PlanBuilder, *, overlaps: bool
    ) -> None:
        """overlaps: the setting `async_scheduling`."""
        self._target, self._draft = target, draft
        self._scheduler, self._plans = scheduler, plans
        self._overlaps = overlaps
        self.host_drafts = HostDrafts(scheduler)

    def plan(self, step_id: int, last: Step | None, unread: DraftStep | None) -> Step | None:
        """A step, with its blocks taken; None when nobody runs, or the next step has to wait for the last one.

        Args:
            step_id: of a step that is behind nothing; else it is the next of the last one.
            last: the step that is in flight.
            unread: the draft step that is, or has been, since the last verify.
        """
        if last is not None:
            return self._plan_behind(last)
        self.host_drafts.make(self._may_overlap_next)
        batch = self._scheduler.schedule()
        if not batch.sequences:
            return None
        plan = self._plans.target_plan(step_id, batch, 0 if unread is None else unread.plan.step_id)
        return Step(batch, plan, self._depth(batch), read=unread)

    def _plan_behind(self, last: Step) -> Step | None:
        if last.depth < 2 or self._scheduler.may_admit:
            return None
        index = [
            i
            for i, (sequence, is_there) in enumerate(zip(last.batch.sequences, last.still_there, strict=True))
            if is_there and sequence.num_remaining_tokens > 1
        ]
        sequences = [last.batch.sequences[i] for i in index]
        batch = StepBatch(sequences, [1] * len(index), len(index))
        if self.host_drafts.are_worth_waiting_for(sequences):
            return None  # its reply is waited for, and the step after it checks them
        if not index or self._depth(batch) < 2 or not self._scheduler.take_next_blocks(sequences):
            return None
        return Step(batch, self._plans.next_plan(last.plan, sequences, index), 2, is_behind=True)

    def _may_overlap_next(self) -> bool:
        """Tell whether a step in which each running sequence has one row would have the next one behind it."""
        running = self._scheduler.running
        is_decoding = all(sequence.is_decoding for sequence in running)
        return is_decoding and self._depth(StepBatch(running, [1] * len(running), len(running))) == 2

    def _depth(self, batch: StepBatch) -> int:
        sequences = batch.sequences
        if not self._overlaps or batch.num_decodes < len(sequences) or not all(s.draws_plainly for s in sequences):
            return 0
        if any(s.uses_draft for s in sequences):
            return min(self._target.depth, 0 if self._draft is None else self._draft.depth)
        is_drafting = self._scheduler.is_drafting
        is_begun = is_drafting and any(s.wants_draft and s.speculation.uses_draft for s in sequences)
        if any(s.grammar is not None for s in sequences):
            return 0  # its next mask depends on what this step draws
        return min(self._target.depth, 1 if is_begun or batch.num_tokens > len(sequences) else 2)
