"""Requests on their way from Triton Server's thread to the engine: read in order of arrival, on threads of their own.

Parsing, rendering and tokenising a long request takes seconds, for which Triton Server's thread would take no other. It
only copies what arrived into a lane: one for short requests, one for long ones, each with a thread. So requests of one
lane reach the engine in the order in which they came, and a short one waits for short ones alone.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kimi_backend.errors import CapacityError, RequestCancelledError
from kimi_backend.serving.incoming import copied_tensors

logger = logging.getLogger("kimi_backend.serving")

SHORT_BYTES = 16 * 2**10
"""A request of up to so many bytes is short: to read it takes a few milliseconds at most."""
MOST_WAITING_BYTES = 64 * 2**20
"""Requests of a lane that wait may hold so much together; one alone may hold more."""
ASK_AFTER_S = 0.1
"""Whoever waited so long is asked whether the client is still there: the question is a message to the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request as it came, copied out of the server's memory."""

    request_id: str
    sender: Any
    """The server's response sender."""
    tensors: dict[str, Any]
    """Input name -> numpy array."""
    parameters: str
    """JSON, or nothing."""
    num_bytes: int
    arrived_s: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, request_id: str, sender: Any, inputs: Iterable[Any], parameters: str) -> "Arrival":
        """Copy a request.

        Args:
            inputs: the server's tensors.

        Raises:
            InvalidRequestError: one has more elements than its field may have.
        """
        tensors = copied_tensors(inputs)
        num_bytes = len(parameters) + sum(map(_num_bytes, tensors.values()))
        return cls(request_id=request_id, sender=sender, tensors=tensors, parameters=parameters, num_bytes=num_bytes)


def _num_bytes(array: Any) -> int:
    texts = sum(map(len, array.reshape(-1))) if array.dtype.hasobject else 0
    return int(array.nbytes) + texts


Read = Callable[[Arrival], None]
Refuse = Callable[[Arrival, BaseException], None]


class RequestLanes:
    """Two lanes. Of each arrival that `put` takes, `read` or `refuse` is called once, or `read` and then `refuse`."""

    def __init__(self, read: Read, refuse: Refuse, most_waiting: int) -> None:
        """
        Args:
            read: called on a lane's thread; what it raises goes to `refuse`.
            most_waiting: requests that may wait in a lane.
        """
        self._short = _Lane("kimi-short", read, refuse, most_waiting)
        self._long = _Lane("kimi-long", read, refuse, most_waiting)

    @property
    def num_waiting(self) -> int:
        """Requests that are not read yet, with those that are being read."""
        return self._short.num_waiting + self._long.num_waiting

    def put(self, arrival: Arrival) -> None:
        """Return at once.

        Raises:
            CapacityError: too much waits already, or the lanes are closed.
        """
        (self._short if arrival.num_bytes <= SHORT_BYTES else self._long).put(arrival)

    def close(self, problem: str) -> None:
        """Refuse what waits and what comes; return at once."""
        for lane in (self._short, self._long):
            lane.close(problem)

    def wait(self, timeout_s: float) -> None:
        """Wait for what is being read, once they are closed."""
        deadline_s = time.monotonic() + timeout_s
        for lane in (self._short, self._long):
            lane.wait(max(0.0, deadline_s - time.monotonic()))


class _Lane:
    def __init__(self, name: str, read: Read, refuse: Refuse, most_waiting: int) -> None:
        self._read, self._refuse, self._most_waiting = read, refuse, most_waiting
        self._waiting: deque[Arrival] = deque()
        self._num_bytes = 0
        self._is_reading = False
        self._problem: str | None = None
        """The reason why it is closed."""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        with self._changed:
            return len(self._waiting) + self._is_reading

    def put(self, arrival: Arrival) -> None:
        with self._changed:
            if self._problem is not None:
                raise CapacityError(self._problem)
            if len(self._waiting) >= self._most_waiting:
                raise CapacityError(
                    f"{len(self._waiting)} requests wait to be read, at most {self._most_waiting} may; try later"
                )
            if self._waiting and self._num_bytes + arrival.num_bytes > MOST_WAITING_BYTES:
                raise CapacityError(
                    f"requests of {self._num_bytes} bytes wait to be read, with this one at most {MOST_WAITING_BYTES}"
                    " may; try later"
                )
            self._waiting.append(arrival)
            self._num_bytes += arrival.num_bytes
            self._changed.notify()

    def close(self, problem: str) -> None:
        with self._changed:
            self._problem = problem
            self._changed.notify()

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_reading = False
                self._changed.wait_for(lambda: self._waiting or self._problem is not None)
                if not self._waiting:
                    return
                arrival = self._waiting.popleft()
                self._num_bytes -= arrival.num_bytes
                self._is_reading = True
            try:
                self._take(arrival)
            except Exception:  # the lane must go on
                logger.exception("request %s: its refusal failed", arrival.request_id)
            del arrival  # it may be large, and the next one may come in an hour

    def _take(self, arrival: Arrival) -> None:
        try:
            if self._problem is not None:
                raise CapacityError(self._problem)
            if time.monotonic() - arrival.arrived_s > ASK_AFTER_S and arrival.sender.is_cancelled():
                raise RequestCancelledError("cancelled by the client before the request was read")
            self._read(arrival)
        except Exception as error:
            self._refuse(arrival, error)
