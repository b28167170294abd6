"""The engine thread's time, phase by phase."""

from time import perf_counter


class StepTimes:
    """Adds up the seconds between laps, by the name of the phase that a lap ends."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(("schedule", "target", "commit", "draft", "publish"), 0.0)
        self.runner_seconds: dict[str, float] = {"target": 0.0, "draft": 0.0}
        """The seconds that runners of other processes say they took of these phases; the rest is the way there."""
        self._start = self._last = self._launched = perf_counter()
        self._is_idle = True

    def start(self) -> None:
        """A step begins; its round did where the last one ended, if there was something to do all the while."""
        self._last = perf_counter()
        if self._is_idle:
            self._start, self._is_idle = self._last, False

    def rest(self) -> None:
        """There is nothing to do."""
        self._is_idle = True

    def launched(self) -> None:
        """The target has a step."""
        self._launched = perf_counter()

    @property
    def since_launch(self) -> float:
        """Seconds from the last launch to the end of the last lap."""
        return self._last - self._launched

    def end_round(self) -> float:
        """A round has ended with the last lap; returns its seconds."""
        seconds, self._start = self._last - self._start, self._last
        return seconds

    def lap(self, phase: str) -> float:
        """The phase ends now; returns its seconds."""
        now = perf_counter()
        seconds = now - self._last
        self.seconds[phase] += seconds
        self._last = now
        return seconds

    def note_runner(self, role: str, microseconds: int) -> None:
        """A reply says how long its runner took."""
        self.runner_seconds[role] += 1e-6 * microseconds
