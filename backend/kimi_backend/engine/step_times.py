"""Where the engine thread's time goes, phase by phase."""

from time import perf_counter


class StepTimes:
    """Adds up the seconds between laps, by the name of the phase that a lap ends."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(("schedule", "target", "commit", "draft", "publish"), 0.0)
        self._last = perf_counter()

    def start(self) -> None:
        """A step begins."""
        self._last = perf_counter()

    def lap(self, phase: str) -> None:
        """The phase ends now."""
        now = perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now
