"""Models that note when they are asked and answer, around the real runners."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Generic, TypeVar

from kimi_backend.spec_decode.protocols import Draft, Pending, Target
from kimi_backend.types.plan import AuxHandle, DraftPlan, DraftReply, RunnerDescription, TargetPlan, TargetReply
from kimi_backend.types.step_costs import StepCosts

Reply = TypeVar("Reply")
Model = TypeVar("Model", bound=Target | Draft)


@dataclass(slots=True)
class Round:
    """One step of the engine; seconds."""

    target_start_s: float
    target_launched_s: float
    target_end_s: float
    num_seqs: int
    num_rows: int
    is_decode: bool
    """Every sequence sampled all its rows: no prompt rode along."""
    num_tokens: int
    """Tokens emitted."""
    num_draft_tokens: tuple[int, ...] = ()
    """Those that were verified, of each sequence, in a decode round."""
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
    on_round: Callable[[Round], None] = lambda done: None


@dataclass(frozen=True, slots=True)
class _RecordedPending(Generic[Reply]):
    pending: Pending[Reply]
    note: Callable[[Reply], None]

    def wait(self) -> Reply:
        reply = self.pending.wait()
        self.note(reply)
        return reply


class Wrapped(Generic[Model]):
    """A model of which only the launches change."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def describe(self) -> RunnerDescription:
        return self._model.describe()

    def measure_costs(self) -> StepCosts:
        return self._model.measure_costs()

    @property
    def depth(self) -> int:
        return self._model.depth


class RecordedTarget(Wrapped[Target]):
    """A target that writes each step down, from its launch to its reply."""

    def __init__(self, target: Target, recording: Recording) -> None:
        super().__init__(target)
        self._recording = recording

    def launch(self, plan: TargetPlan) -> Pending[TargetReply]:
        start = perf_counter()
        pending = self._model.launch(plan)
        launched = perf_counter()
        return _RecordedPending(pending, lambda reply: self._note(plan, reply, start, launched))

    def _note(self, plan: TargetPlan, reply: TargetReply, start: float, launched: float) -> None:
        is_decode = bool((plan.num_sampled_rows == plan.rows.query_lens).all())
        done = Round(
            target_start_s=start,
            target_launched_s=launched,
            target_end_s=perf_counter(),
            num_seqs=len(plan.rows.query_lens),
            num_rows=len(plan.rows.token_ids),
            is_decode=is_decode,
            num_tokens=int(reply.num_accepted_tokens.sum()) + len(reply.num_accepted_tokens),
            num_draft_tokens=tuple((plan.rows.query_lens - 1).tolist()) if is_decode else (),
            target_plan=plan if self._recording.keeps_plans else None,
        )
        self._recording.rounds.append(done)
        self._recording.on_round(done)


class RecordedDraft(Wrapped[Draft]):
    """A draft that writes each proposal down, in the round of the verify before it."""

    def __init__(self, draft: Draft, recording: Recording) -> None:
        super().__init__(draft)
        self._recording = recording

    def launch(self, plan: DraftPlan) -> Pending[DraftReply]:
        """The time of one that is launched behind its verify is part of that one's."""
        start = perf_counter()
        pending = self._model.launch(plan)
        return pending if plan.num_drawn.any() else _RecordedPending(pending, lambda _: self._note(plan, start))

    def _note(self, plan: DraftPlan, start: float) -> None:
        current = self._recording.rounds[-1]
        current.draft_start_s, current.draft_end_s = start, perf_counter()
        if self._recording.keeps_plans:
            # The tensor is one of a few buffers that later steps overwrite, so it is not kept.
            current.draft_plan = replace(plan, aux=AuxHandle())


def replay(target: Any, draft: Any | None, rounds: list[Round]) -> list[tuple[float, float]]:
    """Run recorded rounds again without an engine; (verify, propose) ms of each."""
    times = []
    for item in rounds:
        assert item.target_plan is not None
        start = perf_counter()
        reply = target.launch(item.target_plan).wait()
        middle = perf_counter()
        if draft is not None and item.draft_plan is not None:
            draft.launch(replace(item.draft_plan, aux=reply.aux)).wait()
        times.append((1e3 * (middle - start), 1e3 * (perf_counter() - middle)))
    return times
