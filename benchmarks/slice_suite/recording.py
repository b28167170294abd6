"""Models that note when they are asked and answer, around the real runners."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from kimi_backend.spec_decode.protocols import (
    DraftModel,
    FollowingDraft,
    LaunchingTarget,
    OnQueued,
    PendingVerify,
    QueueingTarget,
    TargetModel,
)
from kimi_backend.types.plan import AuxHandle, DraftPlan, DraftReply, RunnerDescription, TargetPlan, TargetReply


@dataclass(slots=True)
class Round:
    """One step of the engine; seconds."""

    target_start_s: float
    target_end_s: float
    num_seqs: int
    num_rows: int
    is_decode: bool
    """Every sequence sampled all its rows: no prompt rode along."""
    num_tokens: int
    """Tokens emitted."""
    target_plan: TargetPlan | None = None
    draft_plan: DraftPlan | None = None
    draft_start_s: float = 0.0
    draft_end_s: float = 0.0

    @property
    def end_s(self) -> float:
        return max(self.target_end_s, self.draft_end_s)

    @property
    def target_ms(self) -> float:
        return 1e3 * (self.target_end_s - self.target_start_s)

    @property
    def draft_ms(self) -> float:
        return 1e3 * (self.draft_end_s - self.draft_start_s)


@dataclass(slots=True)
class Recording:
    """Rounds in order."""

    keeps_plans: bool = False
    rounds: list[Round] = field(default_factory=list)


class RecordedTarget:
    """A target that writes each verify down."""

    def __init__(self, target: TargetModel, recording: Recording) -> None:
        self._target = target
        self._recording = recording

    def describe(self) -> RunnerDescription:
        return self._target.describe()

    def verify(self, plan: TargetPlan) -> TargetReply:
        start = perf_counter()
        return self._noted(plan, self._target.verify(plan), start)

    @property
    def can_launch(self) -> bool:
        return isinstance(self._target, LaunchingTarget) and self._target.can_launch

    def verify_ahead(self, plan: TargetPlan, on_queued: OnQueued) -> TargetReply:
        """What the draft launches behind it counts as the target's time."""
        start = perf_counter()
        if not isinstance(self._target, LaunchingTarget):
            return self._noted(plan, self._target.verify(plan), start)
        return self._noted(plan, self._target.verify_ahead(plan, on_queued), start)

    def launch(self, plan: TargetPlan) -> PendingVerify | None:
        """A round then begins with its launch, while the one before it is still running."""
        start = perf_counter()
        pending = self._target.launch(plan) if isinstance(self._target, QueueingTarget) else None
        return None if pending is None else _RecordedPending(pending, lambda reply: self._noted(plan, reply, start))

    def _noted(self, plan: TargetPlan, reply: TargetReply, start: float) -> TargetReply:
        end = perf_counter()
        self._recording.rounds.append(
            Round(
                target_start_s=start,
                target_end_s=end,
                num_seqs=len(plan.rows.query_lens),
                num_rows=len(plan.rows.token_ids),
                is_decode=bool((plan.num_sampled_rows == plan.rows.query_lens).all()),
                num_tokens=int(reply.num_accepted_tokens.sum()) + len(reply.num_accepted_tokens),
                target_plan=plan if self._recording.keeps_plans else None,
            )
        )
        return reply


@dataclass(frozen=True, slots=True)
class _RecordedPending:
    pending: PendingVerify
    noted: Callable[[TargetReply], TargetReply]

    def wait(self) -> TargetReply:
        return self.noted(self.pending.wait())


class RecordedDraft:
    """A draft that writes each proposal down, in the round of the verify before it."""

    def __init__(self, draft: DraftModel, recording: Recording) -> None:
        self._draft = draft
        self._recording = recording

    def describe(self) -> RunnerDescription:
        return self._draft.describe()

    def follow(self, plan: DraftPlan) -> DraftReply | None:
        """Its verify is not noted yet, and its time is part of it."""
        return self._draft.follow(plan) if isinstance(self._draft, FollowingDraft) else None

    def propose(self, plan: DraftPlan) -> DraftReply:
        start = perf_counter()
        reply = self._draft.propose(plan)
        end = perf_counter()
        current = self._recording.rounds[-1]
        current.draft_start_s, current.draft_end_s = start, end
        if self._recording.keeps_plans:
            # The tensor is one of a few buffers that later steps overwrite, so it is not kept.
            current.draft_plan = replace(plan, aux=AuxHandle())
        return reply


def replay(target: Any, draft: Any | None, rounds: list[Round]) -> list[tuple[float, float]]:
    """Run recorded rounds again without an engine; (verify, propose) ms of each."""
    times = []
    for item in rounds:
        assert item.target_plan is not None
        start = perf_counter()
        reply = target.verify(item.target_plan)
        middle = perf_counter()
        if draft is not None and item.draft_plan is not None:
            draft.propose(replace(item.draft_plan, aux=reply.aux))
        times.append((1e3 * (middle - start), 1e3 * (perf_counter() - middle)))
    return times
