"""Log lines that clients can cause as often as they like, held to a rate."""

import logging
import time
from collections.abc import Callable

LINES = 5
INTERVAL_S = 10.0


class RateLimit(logging.Filter):
    """Lets LINES records of each kind pass in INTERVAL_S. The next one says how many were left out.

    A kind is a logger, a level and a message before its arguments are filled in.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, int, str], list[float]] = {}
        """Kind -> start of its interval, lines in it, lines left out."""

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        kind = self._kinds.setdefault((record.name, record.levelno, str(record.msg)), [now, 0, 0])
        if now - kind[0] >= INTERVAL_S:
            num_left_out = int(kind[2])
            kind[:] = [now, 0, 0]
            if num_left_out:
                record.msg = f"{record.getMessage()} (and {num_left_out} more like it)"
                record.args = ()
        kind[1] += 1
        if kind[1] > LINES:
            kind[2] += 1
            return False
        return True
