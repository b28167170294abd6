"""One line of log every few seconds while there is work, and a warning when drafts are no longer accepted."""

import logging
from collections.abc import Callable
from itertools import zip_longest

from kimi_backend.engine.core import EngineCore
from kimi_backend.engine.emitter import Emitter
from kimi_backend.spec_decode.acceptance_watch import AcceptanceWatch
from kimi_backend.spec_decode.stats import PROPOSER_NAMES
from kimi_backend.types.proposer import Proposer
from kimi_backend.types.request import SpeculationStats

logger = logging.getLogger("kimi_backend.engine")

PERIOD_S = 10.0


class PeriodicSummary:
    """Rates are those of the period, not of the engine's life."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_s = clock()
        self._num_tokens = 0
        self._speculation: dict[str, SpeculationStats] = {}
        self.acceptance = AcceptanceWatch()

    def log_when_due(self, core: EngineCore, emitter: Emitter) -> None:
        """Call it after each step; costs one clock reading when nothing is due."""
        now = self._clock()
        seconds = now - self._last_s
        if seconds < PERIOD_S:
            return
        totals, scheduler = emitter.totals(), core.scheduler
        speculation = totals.speculation_by_proposer
        logger.info(
            "running=%d waiting=%d tokens_per_s=%.1f %s target_blocks=%d/%d preemptions=%d%s",
            len(scheduler.running),
            len(scheduler.waiting),
            (totals.num_output_tokens - self._num_tokens) / seconds,
            _describe_proposers(speculation, self._speculation),
            core.kv.target_pool.num_held,
            core.kv.target_pool.num_blocks,
            scheduler.num_preemptions,
            "".join(f" synthetic={part!r}" for part in core.geometry.synthetic_parts),
        )
        self._last_s, self._num_tokens, self._speculation = now, totals.num_output_tokens, speculation
        self.judge_acceptance(speculation.get(Proposer.EAGLE3.value))

    def judge_acceptance(self, totals: SpeculationStats | None) -> None:
        """Warn once when acceptance of the draft's tokens becomes bad, and say when it is good again."""
        if self.acceptance.update(totals):
            if self.acceptance.problem is None:
                logger.info("acceptance is as before again")
            else:
                logger.warning(
                    "%s; `kimi probe` finds the settings that a draft was trained with", self.acceptance.problem
                )


def describe_rounds(rounds: SpeculationStats) -> str:
    """Acceptance length and rate, the shares of rounds that kept 0, 1, … draft tokens, and the rate by position.

    A "-" stands where nothing was drafted.
    """
    length, rate = rounds.mean_acceptance_length, rounds.draft_acceptance_rate
    if length is None or rate is None:
        return "acceptance_length=-"
    kept = "/".join(f"{count / rounds.num_spec_steps:.0%}" for count in rounds.acceptance_histogram)
    by_position = "/".join("-" if share is None else f"{share:.2f}" for share in rounds.acceptance_per_position)
    return f"acceptance_length={length:.2f} acceptance_rate={rate:.2f} kept={kept} by_position={by_position}"


def _describe_proposers(now: dict[str, SpeculationStats], before: dict[str, SpeculationStats]) -> str:
    """The rounds between two totals: the draft's as ever, and what was looked up, where anything was."""
    none = SpeculationStats()
    since = {name: _since(now.get(name, none), before.get(name, none)) for name in PROPOSER_NAMES.values()}
    said = describe_rounds(since[Proposer.EAGLE3.value])
    looked_up = since[Proposer.LOOKUP.value]
    return said if not looked_up.num_spec_steps else f"{said} lookup=({describe_rounds(looked_up)})"


def _since(now: SpeculationStats, before: SpeculationStats) -> SpeculationStats:
    """The difference of two totals."""
    return SpeculationStats(
        num_spec_steps=now.num_spec_steps - before.num_spec_steps,
        num_draft_tokens=now.num_draft_tokens - before.num_draft_tokens,
        num_accepted_draft_tokens=now.num_accepted_draft_tokens - before.num_accepted_draft_tokens,
        acceptance_histogram=_minus(now.acceptance_histogram, before.acceptance_histogram),
        drafted_per_position=_minus(now.drafted_per_position, before.drafted_per_position),
        accepted_per_position=_minus(now.accepted_per_position, before.accepted_per_position),
    )


def _minus(now: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    """before: may be shorter, from a time when fewer tokens were drafted."""
    return tuple(a - b for a, b in zip_longest(now, before, fillvalue=0))
