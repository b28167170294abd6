"""The engine thread's time, phase by phase."""

from time import perf_counter


class StepTimes:
    """Adds up the seconds between laps, by the name of the phase that a lap ends."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(("schedule", "target", "commit", "draft", "publish"), 0.0)
        self.runner_seconds: dict[str, float] = {"target": 0.0, "draft": 0.0}
        """The seconds that runners of other processes say they took of these phases; the rest is the way there."""
        self._start = self._last = perf_counter()

    def start(self) -> None:
        """A step begins."""
        self._start = self._last = perf_counter()

    @property
    def since_start(self) -> float:
        """Seconds from the step's beginning to the end of the last lap."""
        return self._last - self._start

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
