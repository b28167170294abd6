"""Turning a function of static tensors into something that can be run again and again: a CUDA graph, or itself."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

Run = Callable[[], None]


class Recorder(Protocol):
    """Makes a step repeatable."""

    def record(self, run: Run) -> Run:
        """A function that does what `run` does, on the same tensors. `run` returns nothing: what a step is to leave
        behind, it writes to tensors that outlive it."""
        ...

    def prepare(self, runs: Iterable[Run]) -> None:
        """Compile what all of these need, at once. Kernels may leave their results unwritten meanwhile."""
        ...


class EagerRecorder:
    """The step is the function: for a CPU, and to compare a graph with. What is prepared runs once, as for a graph."""

    def record(self, run: Run) -> Run:
        return run

    def prepare(self, runs: Iterable[Run]) -> None:
        for run in runs:
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # a run may fill the same pinned memory as the one before


@dataclass(frozen=True, slots=True)
class _Recording:
    """A captured step."""

    graph: torch.cuda.CUDAGraph
    run: Run
    """Kept for the tensors that only it holds: a graph knows their addresses and does not own them."""

    def __call__(self) -> None:
        self.graph.replay()


class GraphRecorder:
    """CUDA graphs that share one memory pool, because one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def prepare(self, runs: Iterable[Run]) -> None:
        from kimi_kernels.kernel_compiling import compiling_only

        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), compiling_only():
            for run in runs:
                run()
                self._stream.synchronize()  # a run may fill the same pinned memory as the one before

    def record(self, run: Run) -> Run:
        # The first run compiles kernels and makes library handles, neither of which a capture may do.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Another thread may use the device meanwhile: an engine's, or a server's.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return _Recording(graph, run)
