"""Requests that wait for room: by priority, then by arrival."""

import heapq

from kimi_backend.scheduler.sequence import Sequence


class WaitingQueue:
    """A preempted sequence returns to the place of its arrival, before all that came later."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.order, sequence))
        self._size += 1

    def peek(self) -> Sequence | None:
        """Return the one that is next."""
        while self._heap and self._heap[0][1].finish is not None:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Take out who is next."""
        sequence = self.peek()
        assert sequence is not None
        heapq.heappop(self._heap)
        self._size -= 1
        return sequence

    def forget(self) -> None:
        """Note that one waiting sequence has finished; its entry is dropped when it comes up."""
        self._size -= 1

    def snapshot(self) -> list[Sequence]:
        """Everyone who waits now, next first."""
        return [sequence for _, sequence in sorted(self._heap, key=lambda e: e[0]) if sequence.finish is None]
