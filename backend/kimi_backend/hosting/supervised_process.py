"""A process beside the server that is started again when it ends, later each time it does so at once."""

import subprocess
import time
from collections.abc import Callable

PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses before the first, second, … start again; the last again and again."""
GOOD_FOR_S = 60.0
"""One that ran so long begins anew with the shortest pause."""
_ENDS_WITHIN_S = 5.0


class SupervisedProcess:
    """Call `look` now and then."""

    def __init__(
        self,
        name: str,
        start: Callable[[], "subprocess.Popen[bytes]"],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts it."""
        self._name = name
        self._start = start
        self._say = say
        self._clock = clock
        self._num_early = 0
        self._start_at: float | None = None
        self._started_at = clock()
        self.process = start()

    def look(self) -> None:
        """Say that it has ended, if it has, and start it again when its pause is over."""
        now = self._clock()
        if self._start_at is not None:
            if now >= self._start_at:
                self._start_at, self._started_at = None, now
                self.process = self._start()
            return
        code = self.process.poll()
        if code is None:
            return
        self._num_early = 0 if now - self._started_at >= GOOD_FOR_S else self._num_early
        pause_s = PAUSES_S[min(self._num_early, len(PAUSES_S) - 1)]
        self._num_early += 1
        self._start_at = now + pause_s
        self._say(f"the {self._name} ended by itself with code {code}: it is started again in {pause_s:g} s")

    def stop(self) -> None:
        """End it, and start it no more."""
        self.process.terminate()
        try:
            self.process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
