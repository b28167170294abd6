"""The numbers that an operator may ask an engine for at any moment."""

from dataclasses import dataclass
from enum import Enum

from kimi_backend.engine.core import EngineCore
from kimi_backend.engine.emitter import OutputTotals


class EngineState(Enum):
    STARTING = "starting"
    """Waiting for the runners."""
    READY = "ready"
    DRAINING = "draining"
    """Finishing live requests, taking no more."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """A snapshot for metrics; numbers of one moment may be a step apart."""

    state: EngineState
    problem: str | None
    """The reason why it does not serve, or serves without speculation; None when all is well."""
    is_speculating: bool
    speculation_policy: str
    num_chosen_draft_tokens: int
    """Most draft tokens that a sequence may propose now."""
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_steps: int
    step_seconds: dict[str, float]
    """Seconds by phase of the step; "target" and "draft" are the waits for the runners."""
    runner_seconds: dict[str, float]
    """Seconds of those two phases that the runners say they took; 0 where they are in this process."""
    target_blocks_held: int
    target_blocks_total: int
    draft_blocks_held: int
    draft_blocks_total: int
    totals: OutputTotals
    lookup_bytes: int = 0
    """Host memory of the indexes of all sequences."""
    num_lookups_refused: int = 0
    """Sequences that went on without an index, for want of that memory."""
    acceptance_problem: str | None = None
    """The reason why the share of accepted draft tokens is not what it should be; None while it is."""
    synthetic_parts: tuple[str, ...] = ()
    """See `RunnerDescription.synthetic_parts`."""


def take_statistics(
    state: EngineState, problem: str | None, num_new: int, core: EngineCore | None, totals: OutputTotals
) -> EngineStatistics:
    """A snapshot; `core` is None before the handshake."""
    if core is None:
        return EngineStatistics(
            state=state,
            problem=problem,
            is_speculating=False,
            speculation_policy="",
            num_chosen_draft_tokens=0,
            num_running=0,
            num_waiting=num_new,
            num_preemptions=0,
            num_steps=0,
            step_seconds={},
            runner_seconds={},
            target_blocks_held=0,
            target_blocks_total=0,
            draft_blocks_held=0,
            draft_blocks_total=0,
            totals=totals,
        )
    target_pool, draft_pool, scheduler = core.kv.target_pool, core.kv.draft_pool, core.scheduler
    return EngineStatistics(
        state=state,
        problem=problem,
        is_speculating=scheduler.is_drafting,
        speculation_policy=scheduler.settings.speculation_policy.value,
        num_chosen_draft_tokens=scheduler.policy.num_chosen_tokens,
        num_running=len(scheduler.running),
        num_waiting=num_new + len(scheduler.waiting),
        num_preemptions=scheduler.num_preemptions,
        num_steps=core.num_steps,
        step_seconds=dict(core.times.seconds),
        runner_seconds=dict(core.times.runner_seconds),
        target_blocks_held=target_pool.num_held,
        target_blocks_total=target_pool.num_blocks,
        draft_blocks_held=0 if draft_pool is None else draft_pool.num_held,
        draft_blocks_total=0 if draft_pool is None else draft_pool.num_blocks,
        totals=totals,
        synthetic_parts=core.geometry.synthetic_parts,
    )
