"""The endpoint as a process: a socket, uvicorn, a line that says where it listens."""

import logging
import signal
import socket
import threading
from collections.abc import Callable

import uvicorn

from kimi_client import KimiClient
from kimi_openai.app import Endpoint
from kimi_openai.settings import EndpointSettings

STOP_WITHIN_S = 35
"""Streams that are still open then are cut; the server's own drain ends them long before."""


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
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(error.errno, f"{host}:{port} cannot be taken: {error.strerror}") from error


def make_server(settings: EndpointSettings) -> uvicorn.Server:
    """uvicorn around the application, not running yet."""
    config = uvicorn.Config(
        Endpoint(settings).make_app(),
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=STOP_WITHIN_S,
    )
    return uvicorn.Server(config)
