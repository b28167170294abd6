"""Work that runs beside the caller's: on a CUDA device in a second stream, which a captured graph keeps as a branch."""

import functools
from collections.abc import Callable

import torch

Work = Callable[[], torch.Tensor]


class SideStream:
    """Starts work and joins it. One piece of work at a time, and what it reads must live until it is joined."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, work: Work) -> Work:
        """Begin `work` behind what the caller has started so far. Returns the function that waits for its result;
        without a second stream, that is when it runs."""
        if self._stream is None:
            return work
        stream, caller = self._stream, torch.cuda.current_stream(self._device)
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            result = work()

        def join() -> torch.Tensor:
            caller.wait_stream(stream)
            return result

        return join


@functools.cache
def side_stream(device: torch.device) -> SideStream:
    """The one second stream of a device: layers run one after another."""
    return SideStream(device)
