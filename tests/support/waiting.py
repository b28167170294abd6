"""Waiting for what comes in a moment: what never comes fails a test, what a busy machine makes late does not."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 180.0
"""No test tells by it how fast something is: it ends those that would wait for ever."""


def wait_for(look: Callable[[], T], problem: object = "it never came", poll_s: float = 0.005) -> T:
    """Return what is seen once it is true. A problem that is a function is asked for when it is needed."""
    deadline = time.monotonic() + PATIENCE_S
    while not (seen := look()):
        assert time.monotonic() < deadline, problem() if callable(problem) else problem
        time.sleep(poll_s)
    return seen
