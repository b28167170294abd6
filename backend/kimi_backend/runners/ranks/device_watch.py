"""Says on a rank other than 0 that its device has failed.

Nothing there waits for a captured step, so the error would come out of the next one, which never comes: rank 0 waits in
a collective for this one.
"""

import threading
import time
from collections.abc import Callable

import torch

_LOOK_S = 0.5
"""The pause between two questions to a device. One costs microseconds of a thread that nobody waits for."""


def watch_device(device: torch.device, fail: Callable[[Exception], None]) -> None:
    """Call `fail`, from another thread, when what was launched on the device's default stream has ended in an error.

    Nothing is watched on a CPU, where a step raises by itself.
    """
    if device.type != "cuda":
        return

    def ask() -> None:
        torch.cuda.default_stream(device).query()

    watch(ask, fail, lambda: torch.cuda.set_device(device))


def watch(
    ask: Callable[[], None], fail: Callable[[Exception], None], begin: Callable[[], None] = lambda: None
) -> threading.Thread:
    """The thread of `watch_device`.

    Args:
        ask: raises once something is wrong; waits for nothing.
        begin: called first, in the thread.
    """

    def look() -> None:
        try:
            begin()
            while True:
                time.sleep(_LOOK_S)
                ask()
        except Exception as error:
            fail(error)

    thread = threading.Thread(target=look, name="kimi-device", daemon=True)
    thread.start()
    return thread
