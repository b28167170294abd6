"""One line of log every few seconds while there is work."""

import logging
from collections.abc import Callable

from kimi_backend.engine.core import EngineCore
from kimi_backend.engine.emitter import Emitter

logger = logging.getLogger("kimi_backend.engine")

PERIOD_S = 10.0


class PeriodicSummary:
    """Rates are those of the period, not of the engine's life."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_s = clock()
        self._num_tokens = self._num_rounds = self._num_accepted = 0

    def log_when_due(self, core: EngineCore, emitter: Emitter) -> None:
        """Call it after each step; costs one clock reading when nothing is due."""
        now = self._clock()
        seconds = now - self._last_s
        if seconds < PERIOD_S:
            return
        totals, scheduler = emitter.totals(), core.scheduler
        speculation = totals.speculation
        num_rounds = speculation.num_spec_steps if speculation else 0
        num_accepted = speculation.num_accepted_draft_tokens if speculation else 0
        rounds = num_rounds - self._num_rounds
        length = f"{1 + (num_accepted - self._num_accepted) / rounds:.2f}" if rounds else "-"
        logger.info(
            "running=%d waiting=%d tokens_per_s=%.1f acceptance_length=%s target_blocks=%d/%d preemptions=%d%s",
            len(scheduler.running),
            len(scheduler.waiting),
            (totals.num_output_tokens - self._num_tokens) / seconds,
            length,
            core.kv.target_pool.num_held,
            core.kv.target_pool.num_blocks,
            scheduler.num_preemptions,
            "".join(f" pretence={pretence!r}" for pretence in core.geometry.pretences),
        )
        self._last_s, self._num_tokens = now, totals.num_output_tokens
        self._num_rounds, self._num_accepted = num_rounds, num_accepted
