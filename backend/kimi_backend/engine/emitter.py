"""The thread between the engine and its clients: text, stop strings, deltas, statistics."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from kimi_backend.engine.commit import StepOutput
from kimi_backend.engine.request_output import RequestOutput
from kimi_backend.scheduler.sequence import Finish, Sequence
from kimi_backend.spec_decode.stats import ProposerCounter
from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS, EndCause, FinishReason, SpeculationStats, TokenDelta

logger = logging.getLogger("kimi_backend.engine")

LONGEST_LAG_WAIT_S = 0.05
"""The engine waits no longer than this for an emitter that is held up by a client's sink."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTotals:
    """Counts of what left the engine since it started."""

    num_finished: dict[FinishReason, int] = field(default_factory=dict)
    num_ended_by: dict[EndCause, int] = field(default_factory=dict)
    """The causes of the cancelled and failed ones."""
    num_prompt_tokens: int = 0
    """Prompt tokens of finished requests, cached ones included."""
    num_cached_tokens: int = 0
    num_looked_up_tokens: int = 0
    """Prompt tokens of finished requests that were looked up in the prefix cache: all but of those never started."""
    num_output_tokens: int = 0
    speculation: SpeculationStats | None = None
    speculation_by_proposer: dict[str, SpeculationStats] = field(default_factory=dict)
    """The sums of what `RequestStats` has under that name."""
    num_draft_tokens_histogram: tuple[int, ...] = (0,) * (MAX_SPECULATIVE_TOKENS + 1)
    """Verifies of all requests that carried 0, 1, … draft tokens; steps that drew a first token are none of them."""


@dataclass(frozen=True, slots=True)
class _EndAll:
    finish: Finish
    tells_engine: bool


class Emitter:
    """Takes each step's outputs off the engine thread's hands.

    `on_end(sequence)` tells the engine of a request that ended here before it did there: its stop string came, or its
    client's sink failed.
    """

    def __init__(self, on_end: Callable[[Sequence, Finish], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_end = on_end
        self._clock = clock
        self._queue: SimpleQueue[list[StepOutput] | _EndAll | None] = SimpleQueue()
        self._outputs: dict[int, RequestOutput] = {}
        self._with_stop_strings: set[int] = set()
        self._num_put = 0
        self._num_done = 0
        self._advanced = threading.Condition()
        self._lock = threading.Lock()
        self._finished: dict[FinishReason, int] = {}
        self._ended_by: dict[EndCause, int] = {}
        self._tokens = [0, 0, 0, 0]
        self._speculation = ProposerCounter()
        self._num_verifies = [0] * (MAX_SPECULATIVE_TOKENS + 1)
        self._thread = threading.Thread(target=self._run, name="kimi-emitter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def register(self, output: RequestOutput) -> None:
        """Expect outputs of a request. Call it before the engine can see the request."""
        self._outputs[output.sequence.uid] = output
        if output.sequence.params.stop:
            self._with_stop_strings.add(output.sequence.uid)

    def put(self, outputs: list[StepOutput]) -> None:
        """Hand over; never blocks."""
        if outputs:
            self._num_put += 1
            self._queue.put(outputs)

    def limit_lag(self) -> None:
        """Engine thread, before a step: while a live request has stop strings, let the emitter be at most one step
        behind, so that a stop string costs at most one step, and one that is in flight. Returns after a while if a sink
        holds the emitter up."""
        if self._with_stop_strings and self._num_put - self._num_done > 1:
            with self._advanced:
                self._advanced.wait_for(lambda: self._num_put - self._num_done <= 1, LONGEST_LAG_WAIT_S)

    def finish_all(self, finish: Finish, tells_engine: bool = False) -> None:
        """End every request that still expects outputs, after those handed over so far.

        Args:
            tells_engine: the engine goes on and is to drop them too; else nothing may be registered any more.
        """
        self._queue.put(_EndAll(finish, tells_engine))

    @property
    def num_live(self) -> int:
        """Requests that have not got their final delta."""
        return len(self._outputs)

    def close(self) -> None:
        """Emit everything handed over so far, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def totals(self) -> OutputTotals:
        """The counts so far. Any thread may ask."""
        with self._lock:
            prompt, cached, output, looked_up = self._tokens
            return OutputTotals(
                num_finished=dict(self._finished),
                num_ended_by=dict(self._ended_by),
                num_prompt_tokens=prompt,
                num_cached_tokens=cached,
                num_output_tokens=output,
                num_looked_up_tokens=looked_up,
                speculation=self._speculation.all.snapshot(),
                speculation_by_proposer=self._speculation.snapshot_by_name(),
                num_draft_tokens_histogram=tuple(self._num_verifies),
            )

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            for output in self._ends(item) if isinstance(item, _EndAll) else item:
                request_output = self._outputs.get(output.sequence.uid)
                if request_output is not None:
                    self._emit(request_output, output)
            with self._advanced:
                self._num_done += not isinstance(item, _EndAll)
                self._advanced.notify()

    def _ends(self, end: "_EndAll") -> list[StepOutput]:
        now = self._clock()
        sequences = [output.sequence for output in self._outputs.copy().values()]
        if end.tells_engine:
            for sequence in sequences:
                self._on_end(sequence, end.finish)
        return [StepOutput(sequence, now, finish=end.finish) for sequence in sequences]

    def _emit(self, request_output: RequestOutput, output: StepOutput) -> None:
        sequence = request_output.sequence
        is_verify = request_output.num_output_tokens > 0
        try:
            delta = request_output.push(output)
        except Exception as error:
            logger.exception("request_id=%s its text could not be made", sequence.request.request_id)
            delta = request_output.fail(f"the output could not be turned into text: {error}", output.time_s)
        if delta is None:
            return
        if delta.finish_reason is not None:
            del self._outputs[sequence.uid]
            self._with_stop_strings.discard(sequence.uid)
            if output.finish is None:
                self._on_end(sequence, Finish(delta.finish_reason, error=delta.error, cause=delta.cause))
        self._count(output, delta, is_verify)
        try:
            request_output.sink(delta)
        except Exception:
            logger.exception("request_id=%s its client's sink failed", sequence.request.request_id)
            self._with_stop_strings.discard(sequence.uid)
            if self._outputs.pop(sequence.uid, None) is not None:
                self._on_end(sequence, Finish(FinishReason.CANCELLED, error="the client's sink failed"))

    def _count(self, output: StepOutput, delta: TokenDelta, is_verify: bool) -> None:
        """is_verify: its step did not draw the request's first token."""
        with self._lock:
            self._tokens[2] += len(delta.token_ids)
            self._speculation.add(output.draft_origin, output.num_draft_tokens, output.num_accepted)
            self._num_verifies[output.num_draft_tokens] += is_verify
            if delta.finish_reason is not None and delta.stats is not None:
                self._tokens[0] += delta.stats.num_prompt_tokens
                self._tokens[1] += delta.stats.num_cached_tokens
                if output.sequence.num_cached_tokens is not None:
                    self._tokens[3] += delta.stats.num_prompt_tokens
                self._finished[delta.finish_reason] = self._finished.get(delta.finish_reason, 0) + 1
                if delta.cause is not None:
                    self._ended_by[delta.cause] = self._ended_by.get(delta.cause, 0) + 1
