"""uvicorn's HTTP/1.1 connection with time limits, a bound on connections, and replies to clients that half-closed."""

import asyncio
import enum
import json
import socket
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from kimi_openai.connection_limits import ConnectionLimits
from kimi_openai.errors import ApiError

PROBE_S = 0.25
"""Between two looks whether a client that sends no more still listens."""


class Phase(enum.Enum):
    """The states of a connection."""

    HEAD = "waits for a request's head"
    BODY = "reads a request's body"
    REPLY = "answers"


class GuardedProtocol(H11Protocol):
    """One connection. Where all are taken, the one that waits longest for a head makes room."""

    def __init__(self, *, limits: ConnectionLimits, waiting: "dict[GuardedProtocol, None]", **of_uvicorn: Any) -> None:
        """
        Args:
            waiting: the connections that wait for a head, longest first; shared by all of a server.
            of_uvicorn: as `H11Protocol` takes them.
        """
        super().__init__(**of_uvicorn)
        self._limits = limits
        self._waiting = waiting
        self._watched: tuple[Phase, RequestResponseCycle | None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._has_begun = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._cut_off_who_reads_nothing()
        if len(self.connections) > self._limits.max_connections:
            longest = next(iter(self._waiting), None)
            if longest is None:
                self._end(ApiError(503, "all connections are taken; try later", headers={"Retry-After": "1"}))
                return
            longest._end(None)
        self._watch()

    def _cut_off_who_reads_nothing(self) -> None:
        """The kernel does it: what a transport has left to write keeps a connection that was closed, too."""
        if sys.platform.startswith("linux"):
            milliseconds = round(1000 * self._limits.unread_s)
            own = self.transport.get_extra_info("socket")
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    def data_received(self, data: bytes) -> None:
        self._has_begun = True
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        self._has_begun = False
        super().on_response_complete()
        self._watch()

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that sends no more may still read the reply to a request that it has sent whole."""
        is_answering = self._phase()[0] is Phase.REPLY
        # An older client would take a probe for its reply.
        if not is_answering or self.scope["http_version"] != "1.1":
            return False
        self.cycle.keep_alive = False
        self._probe()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._end(ApiError(400, msg))

    def _phase(self) -> tuple[Phase, RequestResponseCycle | None]:
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and self.conn.their_state is not h11.SEND_BODY):
            return Phase.HEAD, cycle
        return (Phase.BODY if cycle.more_body else Phase.REPLY), cycle

    def _watch(self) -> None:
        """Start the time of a phase that has just begun; more data of the same phase wins no time."""
        if self.transport.is_closing():
            self._forget()
            return
        phase = self._phase()
        if phase == self._watched:
            return
        self._forget()
        self._watched = phase
        seconds = {Phase.HEAD: self._limits.header_s, Phase.BODY: self._limits.body_s}.get(phase[0])
        if seconds is not None:
            self._timer = self.loop.call_later(seconds, self._expire)
        if phase[0] is Phase.HEAD:
            self._waiting[self] = None

    def _forget(self) -> None:
        self._waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._watched = None

    def _expire(self) -> None:
        is_head = self._phase()[0] is Phase.HEAD
        seconds = self._limits.header_s if is_head else self._limits.body_s
        late = ApiError(408, f"the request's {'head' if is_head else 'body'} took longer than {seconds:g} s")
        self._end(late if self._has_begun else None)

    def _end(self, error: ApiError | None) -> None:
        """Close, after an error where a reply may still begin. Whoever handles a request there is told that it left."""
        self._forget()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if error is not None and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._write(error)
        self.transport.close()

    def _write(self, error: ApiError) -> None:
        body = json.dumps(error.body()).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **error.headers,
        }
        for event in (
            h11.Response(status_code=error.status, headers=list(headers.items())),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")

    def _probe(self) -> None:
        """An interim response, which clients skip; one that is gone answers it with a reset, and writing fails then."""
        if self.transport.is_closing() or self.cycle.response_started:
            return
        self.transport.write(
            self.conn.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")) or b""
        )
        self.loop.call_later(PROBE_S, self._probe)
