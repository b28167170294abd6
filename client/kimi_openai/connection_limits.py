"""Bounds that keep clients which send slowly, nothing or too much, or read nothing, from taking the endpoint away from
the others."""

import resource
from dataclasses import dataclass, replace

from kimi_openai.errors import ApiError

MIB = 2**20
OWN_DESCRIPTORS = 32
"""The listener, the event loop, the gRPC connection, log and libraries."""
FREE_BODY_BYTES = 64 * 2**10
"""The bytes of each body that are free: a short request is read whoever sends long ones."""
ACCEPTED_AT_ONCE = 8
"""Connections that the event loop accepts in one turn."""
_TURNS_TO_COUNT = 4
"""Turns of the loop until the first of them is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds of one process. docs/openai_operations.md lists them."""

    max_connections: int = 4096
    header_s: float = 10.0
    """The time from a connection's start, or the end of its last reply, to the end of a request's head."""
    body_s: float = 30.0
    """The time from there to the end of its body."""
    unread_s: float = 60.0
    """The time in which a client takes nothing of what waits for it, until its connection is cut."""
    max_body_bytes: int = 16 * MIB
    """Some ten times the longest prompt that any Kimi model takes, as token ids."""
    max_bytes_of_all_bodies: int = 128 * MIB
    """Bytes of all bodies together that are not whole yet, the first FREE_BODY_BYTES of each left out."""
    max_drained_bytes: int = 128 * MIB
    """Bytes of a refused body that are read and thrown away, so that its client sees the reply and no reset."""

    def within_descriptors(self) -> "ConnectionLimits":
        """The same, with no more connections than this process may have descriptors for."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return self
        room = max(1, soft - OWN_DESCRIPTORS - _TURNS_TO_COUNT * ACCEPTED_AT_ONCE)
        return replace(self, max_connections=min(self.max_connections, room))


class BodyBudget:
    """Counts the bytes of all bodies that are being read."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def take(self, count: int) -> None:
        """
        Raises:
            ApiError: 503, others have taken what there is.
        """
        if self._num_bytes + count > self._max_bytes:
            message = f"bodies of {self._max_bytes} bytes in all are being read, and no more may be; try later"
            raise ApiError(503, message, headers={"Retry-After": "1"})
        self._num_bytes += count

    def give_back(self, count: int) -> None:
        """Call it when they are read, or will not be."""
        self._num_bytes -= count
