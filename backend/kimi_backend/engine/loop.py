"""The engine thread: handshake first, then one step after another, with an inbox in between."""

import heapq
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kimi_backend.engine.commit import StepOutput
from kimi_backend.engine.compiling import Compiled, CompilingSequences
from kimi_backend.engine.core import EngineCore
from kimi_backend.engine.emitter import Emitter
from kimi_backend.engine.handshake import check_pair, check_runner, resolve
from kimi_backend.engine.periodic_summary import PeriodicSummary
from kimi_backend.engine.runner_link import RunnerLink
from kimi_backend.engine.statistics import EngineState
from kimi_backend.errors import CapacityError, ModelUnavailableError
from kimi_backend.scheduler.sequence import Finish, Sequence
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.spec_decode.protocols import Draft, Target
from kimi_backend.types.plan import RunnerDescription
from kimi_backend.types.request import EndCause, FinishReason

logger = logging.getLogger("kimi_backend.engine")

SHUTTING_DOWN = "the server is shutting down; send the request again"
LONGEST_WAIT_S = 0.05
"""An idle engine thread looks around at least this often; anything in the inbox wakes it at once."""
SWITCH_INTERVAL_S = 0.0005
"""The longest that another thread keeps the interpreter if the engine wants it. Python's own 5 ms would let the
emitter delay a step by more than the step's whole host time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """The time for which the engine waits for an absent runner."""

    draft_s: float = 600.0
    """The start waits so long for the draft once the target is there; then it serves without speculation."""
    target_s: float = 120.0
    """Live requests wait so long for a target that was lost; then they end with an error."""


@dataclass(frozen=True, slots=True)
class _Ending:
    sequence: Sequence
    finish: Finish
    tells_client: bool
    """False when the client has its final delta already."""


class EngineLoop:
    """Owns the core and its thread. Other threads only append to the inbox, under `changed`."""

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        settings: SchedulerSettings,
        patience: Patience,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target, self._draft = target, draft
        self._settings = settings
        self._patience = patience
        self._clock = clock
        self._target_link = RunnerLink(target, "target", clock)
        self._draft_link = None if draft is None else RunnerLink(draft, "draft", clock)
        self.emitter = Emitter(self._end_silently, clock)
        self.core: EngineCore | None = None
        """Set by the handshake."""
        self.state = EngineState.STARTING
        self.is_timing_steps = False
        """True while the runners are there and find out what their steps cost."""
        self.failure: str | None = None
        """The reason why the thread has ended before it was told to."""
        self.changed = threading.Condition()
        """Guards `state` and the inbox."""
        self._newcomers: deque[tuple[Sequence, Compiled | None]] = deque()
        self._endings: deque[_Ending] = deque()
        self._compiling = CompilingSequences(self._wake)
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._summary = PeriodicSummary(clock)
        self._thread = threading.Thread(target=self._run, name="kimi-engine", daemon=True)

    def start(self) -> None:
        self.emitter.start()
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def target_link(self) -> RunnerLink:
        """The link to the target."""
        return self._target_link

    @property
    def draft_link(self) -> RunnerLink | None:
        """The link to the draft, if there is one."""
        return self._draft_link

    @property
    def num_newcomers(self) -> int:
        """Requests that the engine thread has not seen yet, or whose grammar is being compiled."""
        return len(self._newcomers) + len(self._compiling)

    @property
    def problem(self) -> str | None:
        """The reason why it does not serve, or serves without speculation; None when all is well."""
        if self.failure is not None:
            return self.failure
        links = (self._target_link, self._draft_link)
        return next((link.problem for link in links if link is not None and not link.is_up), None)

    @property
    def acceptance_problem(self) -> str | None:
        """The reason why the share of accepted draft tokens is not what it should be; None while it is."""
        return self._summary.acceptance.problem

    def require_ready(self) -> EngineCore:
        """The core, if requests are taken now.

        Raises:
            CapacityError: the engine is shutting down.
            ModelUnavailableError: a runner is missing, or the engine has failed.
        """
        core = self.core
        if self.failure is not None:
            raise ModelUnavailableError(f"the engine has stopped: {self.failure}")
        if self.state in (EngineState.DRAINING, EngineState.CLOSED):
            raise CapacityError("the server is shutting down and takes no more requests; send it again")
        if core is None or not self._target_link.is_up:
            raise ModelUnavailableError(self.problem or "the engine is starting: its runners time their steps")
        return core

    def add(self, sequence: Sequence, compiled: Compiled | None = None) -> None:
        """Hand a checked request over. Call it under `changed`.

        Args:
            compiled: its grammar, which it waits for; nobody else does.
        """
        self._newcomers.append((sequence, compiled))
        self.changed.notify_all()

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def cancel(self, sequence: Sequence, reason: str) -> None:
        """Ask for a request's end, from any thread."""
        finish = Finish(FinishReason.CANCELLED, error=reason, cause=EndCause.CLIENT)
        self._put_ending(_Ending(sequence, finish, True))

    def stop(self) -> None:
        """Cancel everything and end the thread."""
        with self.changed:
            self.state = EngineState.CLOSED
            self.changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _end_silently(self, sequence: Sequence, finish: Finish) -> None:
        self._put_ending(_Ending(sequence, finish, False))

    def _put_ending(self, ending: _Ending) -> None:
        with self.changed:
            self._endings.append(ending)
            self.changed.notify_all()

    def _run(self) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        finish = Finish(FinishReason.CANCELLED, error=SHUTTING_DOWN, cause=EndCause.SHUTDOWN)
        try:
            core = self._connect()
            while core is not None and self.state is not EngineState.CLOSED:
                self.emitter.limit_lag()
                self._take_inbox(core)
                if core.step():
                    self._summary.log_when_due(core, self.emitter)
                else:
                    self._give_up_on_target(core)
                    self._wait(LONGEST_WAIT_S)
        except Exception as error:
            logger.exception("the engine thread ends")
            self.failure = f"{type(error).__name__}: {error}"
            message = f"the engine failed: {self.failure}"
            finish = Finish(FinishReason.ERROR, error=message, cause=EndCause.ENGINE_FAILED)
        finally:
            with self.changed:
                self.state = EngineState.CLOSED
                self.changed.notify_all()
            if self.core is not None:
                self.core.flush_outputs()
            self.emitter.finish_all(finish)
            self.emitter.close()

    def _connect(self) -> EngineCore | None:
        """Handshake with both runners; None when the engine was stopped meanwhile."""
        draft_deadline_s: float | None = None
        while self.state is not EngineState.CLOSED:
            target = self._describe(self._target_link)
            draft = None if self._draft_link is None else self._describe(self._draft_link)
            if target is not None:
                now = self._clock()
                draft_deadline_s = now + self._patience.draft_s if draft_deadline_s is None else draft_deadline_s
                if draft is not None or self._draft_link is None or now >= draft_deadline_s:
                    try:
                        return self._make_core(target, draft)
                    except ModelUnavailableError as error:  # which of them, asking again will tell
                        self._forget_runners(str(error))
            self._wait(LONGEST_WAIT_S)
        return None

    def _forget_runners(self, problem: str) -> None:
        for link in (self._target_link, self._draft_link):
            if link is not None:
                link.lose(problem)
                link.description = None

    def _describe(self, link: RunnerLink) -> RunnerDescription | None:
        """An earlier answer, or a new one that is checked."""
        if link.description is None and (description := link.try_connect()) is not None:
            check_runner(description, link.role)
            link.accept(description)
        return link.description

    def _make_core(self, target: RunnerDescription, draft: RunnerDescription | None) -> EngineCore:
        if draft is not None:
            check_pair(target, draft)
        elif self._draft_link is not None:
            logger.warning("speculation is off: %s", self._draft_link.problem)
        self.is_timing_steps = True
        try:
            core = EngineCore(
                self._target,
                self._draft,
                self._target_link,
                self._draft_link,
                resolve(target, draft, self._settings),
                self.emitter.put,
                self._clock,
                last_step_id=time.time_ns() // 1000,
            )
        finally:
            self.is_timing_steps = False
        with self.changed:
            self.core = core
            if self.state is EngineState.STARTING:
                self.state = EngineState.READY
            self.changed.notify_all()
        return core

    def _take_inbox(self, core: EngineCore) -> None:
        """Newcomers first, so that a request cancelled at once is known when its end comes."""
        while self._newcomers:
            sequence, compiled = self._newcomers.popleft()
            if sequence.deadline_s is not None:
                self._watch_deadline(sequence, sequence.deadline_s)
            if compiled is None:
                core.add(sequence)
            else:
                self._compiling.add(sequence, compiled)
        for sequence in self._compiling.take():
            if sequence.finish is None:
                core.add(sequence)
            else:
                self.emitter.put([StepOutput(sequence, self._clock(), finish=sequence.finish)])
        while self._endings:
            ending = self._endings.popleft()
            self._end(core, ending.sequence, ending.finish, ending.tells_client)
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            sequence = heapq.heappop(self._deadlines)[2]
            message = f"its deadline of {sequence.request.timeout_s} s has passed"
            finish = Finish(FinishReason.CANCELLED, error=message, cause=EndCause.DEADLINE)
            self._end(core, sequence, finish, True)

    def _watch_deadline(self, sequence: Sequence, deadline_s: float) -> None:
        """Watch it, and forget those that ended long before their deadline, so that the heap holds as many as are
        live."""
        if len(self._deadlines) > 64 + 2 * self.emitter.num_live:
            self._deadlines = [entry for entry in self._deadlines if entry[2].finish is None]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline_s, sequence.uid, sequence))

    def _end(self, core: EngineCore, sequence: Sequence, finish: Finish, tells_client: bool) -> None:
        if self._compiling.remove(sequence):
            sequence.finish = finish
        elif not core.end(sequence, finish):
            return
        if tells_client:
            self.emitter.put([StepOutput(sequence, self._clock(), finish=finish)])

    def _give_up_on_target(self, core: EngineCore) -> None:
        lost_s = self._target_link.lost_s
        if lost_s is None or self._clock() - lost_s < self._patience.target_s or not core.scheduler.has_work:
            return
        finish = Finish(FinishReason.ERROR, error=self._target_link.problem, cause=EndCause.TARGET_LOST)
        for sequence in core.scheduler.waiting.snapshot():  # a lost target leaves nobody running
            self._end(core, sequence, finish, True)

    def _wait(self, longest_s: float) -> None:
        """Wait until something is in the inbox, a deadline is due, or the time is over."""
        with self.changed:
            if self._newcomers or self._endings or self._compiling.has_news or self.state is EngineState.CLOSED:
                return
            if self._deadlines:
                longest_s = min(longest_s, max(self._deadlines[0][0] - self._clock(), 0.0))
            self.changed.wait(longest_s)
