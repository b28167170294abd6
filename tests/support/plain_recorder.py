"""Steps in static arrays that run as they are, for tests of anything but their recording."""

from collections.abc import Iterable

from kimi_backend.runners.graphs.recorder import Run


class PlainRecorder:
    """Nothing runs before it is asked for: a pair of runners is there in a twentieth of the time.

    `EagerRecorder` runs every bucket first, as a capture does; tests of that use it.
    """

    def record(self, run: Run) -> Run:
        return run

    def prepare(self, runs: Iterable[Run]) -> None:
        return None
