"""Requests that wait for room: by priority, then by arrival."""

import heapq

from kimi_backend.scheduler.sequence import Sequence

MOST_FINISHED = 16
"""Entries of finished sequences that a queue may hold beside as many as wait."""


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
        """Note that one waiting sequence has finished. Its entry is dropped when it comes up, or with others as soon as
        they are more than those that wait: behind work of a higher priority none may come up for hours."""
        self._size -= 1
        if len(self._heap) > 2 * self._size + MOST_FINISHED:
            self._heap = [entry for entry in self._heap if entry[1].finish is None]
            heapq.heapify(self._heap)

    def snapshot(self) -> list[Sequence]:
        """Everyone who waits now, next first."""
        return [sequence for _, sequence in sorted(self._heap, key=lambda e: e[0]) if sequence.finish is None]
