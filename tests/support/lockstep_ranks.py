"""Tensor-parallel ranks as threads of one process that take turns: one runs at a time, from collective to collective.

Triton-language's interpreter runs one kernel at a time, and eight processes would take longer to start than to compute.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from kimi_backend.parallel import TensorParallelGroup

Result = TypeVar("Result")
STUCK_S = 60.0


class _Meeting:
    """The place where ranks exchange tensors."""

    def __init__(self, size: int) -> None:
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(size, timeout=STUCK_S)
        self.given: list[torch.Tensor] = [torch.empty(0)] * size


class LockstepRank:
    """One rank; collectives by their definitions."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.size = len(meeting.given)
        self.all_reduce_norm = None
        self._meeting = meeting

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x)).sum(dim=0)

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=1)

    def all_argmax(self, values: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        all_values, all_ids = torch.stack(self._exchange(values)), torch.stack(self._exchange(token_ids))
        best = all_values.amax(dim=0)
        return best, all_ids.masked_fill(all_values != best, torch.iinfo(all_ids.dtype).max).amin(dim=0)

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        meeting = self._meeting
        meeting.given[self.rank] = x
        meeting.turn.release()
        try:
            meeting.barrier.wait()
            given = list(meeting.given)
            meeting.barrier.wait()  # nobody gives again before all have taken
        finally:
            meeting.turn.acquire()
        return given


def run_ranks(size: int, work: Callable[[TensorParallelGroup], Result]) -> list[Result]:
    """The results of `work`, one a rank. One rank's failure fails all."""
    meeting = _Meeting(size)

    def run(rank: int) -> Result:
        with meeting.turn, torch.inference_mode():
            try:
                return work(LockstepRank(rank, meeting))
            except BaseException:
                meeting.barrier.abort()
                raise

    with ThreadPoolExecutor(size) as threads:
        runs = [threads.submit(run, rank) for rank in range(size)]
    errors = [error for error in (done.exception() for done in runs) if error is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    if errors:
        raise errors[0]
    return [done.result() for done in runs]
