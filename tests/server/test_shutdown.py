"""`kimi serve` under load: SIGTERM ends every request, every process and every shared-memory region."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_backend.hosting.embedded_server import free_port
from kimi_client import KimiClient, RequestCancelled, ServerUnreachable
from support.openai_endpoint import RunningEndpoint, read_events
from support.server_process import ENDLESS, ENDLESS_KV_TOKENS, ENDLESS_MODEL_LEN, ended_with_tests
from support.waiting import PATIENCE_S, wait_for

DRAIN_S = 3
"""The server waits for live requests for as long as it was told at its start."""


def processes_of_group(group):
    alive = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[2]) == group and fields[0] != "Z":
                alive.append(int(entry.name))
    return alive


@pytest.fixture
def serve(checkpoint, tmp_path, request):
    """`kimi serve`; a parameter is its drain_timeout_s."""
    ports = {name: free_port() for name in ("http", "grpc", "metrics", "openai")}
    command = [
        sys.executable,
        "-m",
        "kimi_backend.cli.main",
        "serve",
        f"--checkpoint={checkpoint}",
        f"--draft={checkpoint / 'draft'}",
        f"--kv-tokens={ENDLESS_KV_TOKENS}",
        f"--max-model-len={ENDLESS_MODEL_LEN}",
        f"--log-file={tmp_path / 'server.log'}",
        *(f"--{name}-port={port}" for name, port in ports.items()),
    ]
    environment = {**os.environ, "KIMI_DRAIN_TIMEOUT_S": str(getattr(request, "param", DRAIN_S))}
    process = subprocess.Popen(
        ended_with_tests(command), stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    yield process, ports
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()


def wait_until_ready(process, ports):
    client = KimiClient(f"localhost:{ports['grpc']}")

    def is_ready():
        assert process.poll() is None, process.stderr.read()
        return client.is_ready()

    wait_for(is_ready, poll_s=0.2)
    return client


@pytest.mark.parametrize("serve", [0.2], indirect=True)
def test_what_runs_at_the_end_of_a_drain_is_cut_off_and_nothing_is_left_behind(serve):
    process, ports = serve
    client = wait_until_ready(process, ports)
    endpoint = wait_for_endpoint(ports)
    server_group = group_of_server(ports)
    streams = [client.stream(text_input=f"tell {i}", **ENDLESS) for i in range(12)]
    for stream in streams:
        next(iter(stream))
    connection = endpoint.connect()
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "tell", "stream": True, **ENDLESS}))
    reply = connection.getresponse()
    process.send_signal(signal.SIGTERM)
    for stream in streams:
        with pytest.raises(RequestCancelled, match="shutting down; send the request again"):
            stream.result()
    assert "shutting down" in read_events(reply.read())[-1]["error"]["message"]
    connection.close()
    assert process.wait(PATIENCE_S) == 0
    with pytest.raises(ConnectionRefusedError):
        endpoint.send("GET", "/health")
    assert processes_of_group(server_group) == []
    assert list(Path("/dev/shm").glob(f"kimi_{ports['http']}_*")) == []
    with pytest.raises(ServerUnreachable):
        client.generate(text_input="x", max_tokens=1)


def test_a_kill_under_load_leaves_no_process_behind(serve):
    """Nobody is there to end the server then: it notices. Its shared memory goes too, as it ends in order."""
    process, ports = serve
    client = wait_until_ready(process, ports)
    server_group = group_of_server(ports)
    streams = [client.stream(text_input=f"tell {i}", **ENDLESS) for i in range(4)]
    for stream in streams:
        next(iter(stream))
    endpoint = wait_for_endpoint(ports)
    process.kill()
    process.wait()
    outlives = "the server, or its endpoint, outlives the command"
    wait_for(lambda: not processes_of_group(server_group) and not is_there(endpoint), outlives, poll_s=0.1)
    assert list(Path("/dev/shm").glob(f"kimi_{ports['http']}_*")) == []
    for stream in streams:
        stream.cancel()


def is_there(endpoint):
    try:
        return endpoint.send("GET", "/health")[0] in (200, 503)
    except OSError:
        return False


def wait_for_endpoint(ports):
    endpoint = RunningEndpoint(ports["openai"])
    wait_for(lambda: is_there(endpoint), poll_s=0.1)
    return endpoint


def group_of_server(ports):
    """The server is the first of its process group."""
    return next(
        int(p.name)
        for p in Path("/proc").iterdir()
        if p.name.isdigit()
        and b"tritonserver" in _command(p)
        and f"--http-port={ports['http']}".encode() in _command(p)
    )


def _command(entry):
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("folder", "options", "message"),
    [
        ("none", [], r"setting checkpoint: \S+/none given, which is not a folder"),
        ("tiny", ["--tokenizer=."], "has no tokenizer: expected tiktoken.model or tokenizer.json"),
    ],
)
def test_what_cannot_be_served_is_one_clear_message_at_the_end(checkpoint, tmp_path, folder, options, message):
    """The server's own log says it too, among a hundred other lines."""
    (tmp_path / "tiny").symlink_to(checkpoint)
    command = [sys.executable, "-m", "kimi_backend.cli.main", "serve", f"--checkpoint={tmp_path / folder}", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path)
    assert done.returncode == 2
    assert re.search(f"error: .*{message}", done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr
