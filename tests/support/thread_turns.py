"""Counts where other threads may get their turn while something runs."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def chances_beside(work: Callable[[], Any]) -> int:
    """The calls in C that `work` makes: between two of them another thread may run, within one of them none."""
    chances = 0

    def count(_: FrameType, event: str, __: Any) -> None:
        nonlocal chances
        chances += event == "c_call"

    before = sys.getprofile()
    gc.disable()  # who listens to it makes calls too
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return chances
