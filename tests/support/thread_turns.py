"""Counts how often other threads get their turn while something runs."""

import sys
import threading
from collections.abc import Callable
from typing import Any


def turns_beside(work: Callable[[], Any]) -> int:
    """The turns that this thread gets while another one does `work`: one or two if that is a single call in C."""
    turns, is_over, interval_s = 0, threading.Event(), sys.getswitchinterval()

    def run() -> None:
        work()
        is_over.set()

    thread = threading.Thread(target=run)
    sys.setswitchinterval(1e-4)
    try:
        thread.start()
        while not is_over.is_set():
            is_over.wait(1e-5)
            turns += 1
    finally:
        sys.setswitchinterval(interval_s)
        thread.join()
    return turns
