"""`kimi serve`: the real Triton Server on this machine, without a container."""

import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

from rich.console import Console

from kimi_backend.cli.preflight import check_beside, check_quickly
from kimi_backend.config.settings import ServingSettings
from kimi_backend.hosting import with_parent
from kimi_backend.hosting.embedded_server import EVERY_HOST, LOCAL_HOST, EmbeddedServer, ServerPorts, free_port
from kimi_backend.hosting.ports import check_ports
from kimi_backend.hosting.settings_to_server import make_server, settings_as_environment
from kimi_backend.hosting.supervised_process import SupervisedProcess
from kimi_backend.processes import raise_descriptor_limit

_WATCH_S = 0.2


def serve(
    settings: ServingSettings,
    *,
    http_port: int | None,
    grpc_port: int | None,
    metrics_port: int | None,
    openai_port: int | None,
    host: str,
    model_repository: Path | None,
    log_file: Path | None,
    triton_args: tuple[str, ...] = (),
) -> int:
    """Check, start, say where to send requests, wait for SIGTERM or Ctrl-C, drain, stop. Returns the exit code.

    Args:
        triton_args: more of Triton Server's command line.
        openai_port: where an OpenAI-compatible endpoint listens too; None: there is none.

    Raises:
        ConfigError: the settings or files cannot be served.
        ModelUnavailableError: the server ended while it loaded, or does not answer.
    """
    console = Console(stderr=True)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())  # for as long as nobody is served
    ports = ServerPorts(
        http=http_port or free_port(), grpc=grpc_port or free_port(), metrics=metrics_port or free_port()
    )
    wanted = {"HTTP": ports.http, "gRPC": ports.grpc, "metrics": ports.metrics}
    if openai_port is not None:
        wanted["OpenAI"] = openai_port
    check_ports(wanted)  # before what takes seconds
    with console.status("checking settings and checkpoints ..."):
        check_quickly(settings)
        check_beside(settings_as_environment(settings))
    server = make_server(
        settings,
        ports=ports,
        host=host,
        model_repository=model_repository,
        log_file=log_file,
        ends_with_parent=True,
        options=triton_args,
    )
    raise_descriptor_limit(console.print)
    server.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.cut_drain_short() if stop.is_set() else stop.set())
    beside = [SupervisedProcess("watchdog", server.start_watchdog, console.print)]
    try:
        with console.status("loading the models ..."):
            server.wait_until_ready(stop_waiting=stop)
        if not stop.is_set():
            _say_where(console, settings, ports)
            if openai_port is not None:
                start = partial(_start_endpoint, grpc_port=ports.grpc, host=host, port=openai_port)
                beside.append(SupervisedProcess("OpenAI endpoint", start, console.print))
        return _watch(server, beside, stop, console)
    finally:
        if server.process.poll() is None:
            console.print(
                f"draining: no new requests, live ones have {settings.drain_timeout_s:g} s; again, and they are cut off"
            )
        server.stop(drain_s=settings.drain_timeout_s, say=console.print)
        for kept in reversed(beside):
            kept.stop()


def _say_where(console: Console, settings: ServingSettings, ports: ServerPorts) -> None:
    proposer, k = settings.chosen_proposer.value, settings.num_speculative_tokens
    speculation = f"{proposer}, k = {k}" if settings.most_draft_tokens else "off (no draft)"
    console.print(f"ready: {settings.checkpoint}, speculation {speculation}")
    console.print(f"  gRPC     localhost:{ports.grpc}   kimi generate --url localhost:{ports.grpc} 'def add(a, b):'")
    console.print(
        f"  HTTP     localhost:{ports.http}   POST /v2/models/spec_ensemble/generate_stream (this machine only)"
    )
    console.print(f"  metrics  localhost:{ports.metrics}/metrics")
    console.print("Ctrl-C or SIGTERM stops it.")


def _watch(server: EmbeddedServer, beside: list[SupervisedProcess], stop: threading.Event, console: Console) -> int:
    while not stop.wait(_WATCH_S):
        code = server.process.poll()
        if code is not None:
            console.print(f"[red]the server exited by itself with code {code}[/red]")
            return 1
        for kept in beside:
            kept.look()
    return 0


def _start_endpoint(*, grpc_port: int, host: str, port: int) -> subprocess.Popen[bytes]:
    """`kimi openai` as a process of its own, which ends with this one, however it ends.

    Args:
        host: address that the server listens on, and the endpoint then.
    """
    server_host = LOCAL_HOST if host == EVERY_HOST else host
    kimi = [sys.executable, "-m", "kimi_backend.cli.main"]
    options = [f"--url={server_host}:{grpc_port}", f"--host={host}", f"--port={port}"]
    return subprocess.Popen([sys.executable, "-S", with_parent.__file__, str(os.getpid()), *kimi, "openai", *options])
