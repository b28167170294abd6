"""The endpoint as a process: a socket, uvicorn, a line that says where it listens."""

import signal
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import uvicorn
from prometheus_client import start_http_server

from kimi_client import KimiClient
from kimi_openai.app import Endpoint
from kimi_openai.connection_limits import ACCEPTED_AT_ONCE
from kimi_openai.guarded_protocol import GuardedProtocol
from kimi_openai.logs import set_up_logs
from kimi_openai.settings import EndpointSettings

if TYPE_CHECKING:
    from kimi_openai.tracing import RequestTracer

BACKLOG = 2048
"""Connections that may wait to be accepted."""


def serve(
    settings: EndpointSettings,
    *,
    host: str,
    port: int,
    say: Callable[[str], None],
    metrics_port: int | None = None,
    logs_json: bool = False,
    logs_access: bool = False,
    otlp_endpoint: str = "",
) -> None:
    """Serve until SIGTERM or Ctrl-C; streams that run then may end.

    Args:
        port: 0 takes a free one.
        say: gets a line once clients may connect.
        metrics_port: where Prometheus asks for /metrics, on the same host; None: nowhere.
        logs_json, logs_access: see `set_up_logs`.
        otlp_endpoint: URL of a collector that gets spans; empty: there are none.

    Raises:
        InvalidRequest: the url is none of a gRPC endpoint.
        OSError: the address cannot be taken.
    """
    client = KimiClient(settings.url)
    set_up_logs(as_json=logs_json, with_access=logs_access)
    endpoint = Endpoint(settings, _make_tracer(otlp_endpoint))
    with open_socket(host, port) as listener:
        if metrics_port is not None:
            start_http_server(metrics_port, host, endpoint.metrics.registry)
            say(f"metrics at http://{host}:{metrics_port}/metrics")
        address, taken, *_ = listener.getsockname()
        shown = f"[{address}]" if ":" in address else address
        say(f"http://{shown}:{taken}/v1 for {', '.join(settings.model_names)}, answered by {settings.url}")
        threading.Thread(target=_say_if_nobody_answers, args=(client, say), daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            # When it has stopped, uvicorn hands the signal on to who had it before: nothing is left to do.
            signal.signal(number, lambda *_: None)
        make_server(settings, endpoint).run(sockets=[listener])


def _make_tracer(otlp_endpoint: str) -> "RequestTracer | None":
    if not otlp_endpoint:
        return None
    from kimi_openai.tracing import RequestTracer

    return RequestTracer.to(otlp_endpoint)


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


def make_server(settings: EndpointSettings, endpoint: Endpoint | None = None) -> uvicorn.Server:
    """uvicorn around the application, not running yet."""
    limits, waiting = settings.limits.within_descriptors(), dict[GuardedProtocol, None]()
    config = uvicorn.Config(
        (endpoint or Endpoint(settings)).make_app(),
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
