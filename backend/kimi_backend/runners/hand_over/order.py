"""The order of two processes' steps: on a GPU its streams wait, on a CPU the caller does."""

import time
from contextlib import suppress
from typing import Protocol

import torch

from kimi_backend.runners.cuda_ipc import CudaIpcError
from kimi_backend.runners.hand_over.semaphores import SharedSemaphores, offset_of
from kimi_backend.runners.hand_over.stream_memory import StreamMemory
from kimi_backend.runners.ranks.messages import OPEN_SEMAPHORES, WorkerError
from kimi_backend.runners.ranks.workers import NO_WORKERS, Workers

_SLEEP_S = 0.00005


class StepOrder(Protocol):
    """Queues on the device that the process computes on."""

    def wait(self, semaphore: int, value: int) -> None:
        """Let what is queued after this happen when a semaphore has reached a value."""
        ...

    def write(self, semaphore: int, value: int) -> None:
        """Set a semaphore when all that was queued before is done."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Contiguous tensors of one size, one of them in the shared memory."""
        ...

    def close(self) -> None:
        """Wait for what is queued, and leave the shared memory alone from then on."""
        ...


class StreamOrder:
    """The current stream's. The host never waits. The workers' streams wait before their next step for the same
    values: in a collective they would keep the other process from their GPUs meanwhile."""

    def __init__(self, semaphores: SharedSemaphores, device: torch.device, handle: bytes, workers: Workers) -> None:
        """Raises CudaIpcError: the driver or the device cannot do it, or a worker's."""
        self._memory, self._workers = StreamMemory(semaphores.address, semaphores.num_bytes, device), workers
        try:
            workers.ask(OPEN_SEMAPHORES, [handle] * workers.count)
        except WorkerError as error:
            self.close()
            raise CudaIpcError(str(error)) from None

    def wait(self, semaphore: int, value: int) -> None:
        self._memory.wait(offset_of(semaphore), value)
        self._workers.wait_before_next(semaphore, value)

    def write(self, semaphore: int, value: int) -> None:
        self._memory.write(offset_of(semaphore), value)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def close(self) -> None:
        with suppress(WorkerError):
            self._workers.ask(OPEN_SEMAPHORES, [b""] * self._workers.count)
        self._memory.close()


class HostOrder:
    """A CPU's: everything happens when it is queued."""

    def __init__(self, semaphores: SharedSemaphores) -> None:
        self._semaphores = semaphores

    def wait(self, semaphore: int, value: int) -> None:
        while self._semaphores.value(semaphore) < value:
            time.sleep(_SLEEP_S)

    def write(self, semaphore: int, value: int) -> None:
        self._semaphores.set_value(semaphore, value)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def close(self) -> None:
        return None


def order_of(
    semaphores: SharedSemaphores, device: torch.device, handle: bytes = b"", workers: Workers = NO_WORKERS
) -> StepOrder:
    """
    Args:
        handle: of the semaphores, for the workers.
        workers: the other ranks. On a CPU they are told of a step when its wait is over.

    Raises:
        CudaIpcError: the device's streams cannot wait for memory.
    """
    return HostOrder(semaphores) if device.type != "cuda" else StreamOrder(semaphores, device, handle, workers)
