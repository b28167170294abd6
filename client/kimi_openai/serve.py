"""The endpoint as a process: a socket, uvicorn, a line that says where it listens."""

import logging
import signal
import socket
import threading
from collections.abc import Callable
from functools import partial

import uvicorn

from kimi_client import KimiClient
from kimi_openai.app import Endpoint
from kimi_openai.connection_limits import ACCEPTED_AT_ONCE
from kimi_openai.guarded_protocol import GuardedProtocol
from kimi_openai.log_limits import RateLimit
from kimi_openai.settings import EndpointSettings

BACKLOG = 2048
"""Connections that may wait to be accepted."""


def serve(settings: EndpointSettings, *, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; streams that run then may end.

    Args:
        port: 0 takes a free one.
        say: gets a line once clients may connect.

    Raises:
        InvalidRequest: the url is none of a gRPC endpoint.
        OSError: the address cannot be taken.
    """
    client = KimiClient(settings.url)
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(RateLimit())
    with open_socket(host, port) as listener:
        address, taken, *_ = listener.getsockname()
        shown = f"[{address}]" if ":" in address else address
        say(f"http://{shown}:{taken}/v1 for {', '.join(settings.model_names)}, answered by {settings.url}")
        threading.Thread(target=_say_if_nobody_answers, args=(client, say), daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            # When it has stopped, uvicorn hands the signal on to who had it before: nothing is left to do.
            signal.signal(number, lambda *_: None)
        make_server(settings).run(sockets=[listener])


def _say_if_nobody_answers(client: KimiClient, say: Callable[[str], None]) -> None:
    with client:
        if not client.is_ready():
            say(
                f"nobody answers at {client.url}: requests get 503 until a server is ready there"
                " (kimi serve starts one; is this its gRPC port?)"
            )


def open_socket(host: str, port: int) -> socket.socket:
    """
    Raises:
        OSError: the address cannot be taken; says which.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        # What is accepted inherits it. asyncio sets it only where a socket names its protocol, which this one does not;
        # without it each small write waits up to 40 ms for the client to acknowledge the one before.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise OSError(error.errno, f"{host}:{port} cannot be taken: {error.strerror}") from error


def make_server(settings: EndpointSettings) -> uvicorn.Server:
    """uvicorn around the application, not running yet."""
    limits, waiting = settings.limits.within_descriptors(), dict[GuardedProtocol, None]()
    config = uvicorn.Config(
        Endpoint(settings).make_app(),
        http=partial(GuardedProtocol, limits=limits, waiting=waiting),  # type: ignore[arg-type]
        ws="none",
        backlog=ACCEPTED_AT_ONCE,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=settings.stop_within_s,
    )
    return _Server(config)


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's backlog is also how many connections are accepted before one is counted: more may wait."""
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(BACKLOG)
