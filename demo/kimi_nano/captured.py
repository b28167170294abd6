"""A step's work on a GPU, recorded once as a CUDA graph and replayed: a small model's step is mostly launches."""

from collections.abc import Callable

import torch
from torch import Tensor

WARM_UP = 3
"""Plain calls before recording, in which compiled code compiles and optimizers and caches settle."""


class Captured:
    """A function of one tensor of fixed shape. It must not wait for the device, and its Python runs only until it is
    recorded; tensors that it leaves behind (gradients) keep their place and are rewritten by each call."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self._function = function
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0
        self._input = self._output = torch.empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        if self._calls < WARM_UP:
            self._calls += 1
            return self._on_side_stream(x)
        if self._graph is None:
            self._input = x.clone()
            self._record()
        self._input.copy_(x)
        assert self._graph is not None
        self._graph.replay()
        return self._output.clone()

    def _on_side_stream(self, x: Tensor) -> Tensor:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = self._function(x)
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def _record(self) -> None:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._output = self._function(self._input)
        self._graph = graph
