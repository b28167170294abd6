"""`kimi serve` and the start script while processes are killed: every stream ends or goes on, and nothing is left.

scripts/kill_matrix.py does it with every process, signal and protocol.
"""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kimi_backend.hosting.admin_access import admin_headers
from kimi_backend.hosting.embedded_server import free_port
from kimi_backend.hosting.stubs import find_stubs
from kimi_backend.processes import LARGE_BYTES, LARGE_BYTES_VARIABLE
from kimi_client import KimiClient, KimiClientError, ServerFailed, ServerUnreachable
from support.server_process import (
    ENDLESS,
    ENDLESS_KV_TOKENS,
    ENDLESS_MODEL_LEN,
    FEW_DESCRIPTORS,
    allow_few_descriptors,
    ended_with_tests,
)
from support.start_script import started
from support.waiting import PATIENCE_S, wait_for

WHOLE = {"max_tokens": 480, "ignore_eos": True}
"""A request that is read to its end."""
ENDED_BY_WATCHDOG = "watchdog: spec_ensemble: its process .* the server is ended"
"""Now and then 24.10 aborts by itself before (SIGABRT: -6, 134 to a shell), which ends the streams too."""
SECRET = "of-this-test"


class Serve:
    def __init__(self, process, ports, log):
        self.process, self.ports, self.log = process, ports, log
        self.client = KimiClient(f"localhost:{ports['grpc']}", timeout_s=PATIENCE_S)

    @property
    def prefix(self):
        return f"kimi_{self.ports['http']}_"

    def kill(self, model):
        (pid,) = (stub.pid for stub in find_stubs(self.prefix) if stub.model == model)
        os.kill(pid, signal.SIGKILL)
        return pid

    def streams(self, count, fields=ENDLESS):
        streams = [self.client.stream(text_input=f"tell {i}", **fields) for i in range(count)]
        for stream in streams:
            next(iter(stream))
        return streams

    def http_streams(self, count):
        """Run so many over HTTP and say how each ended."""
        with ThreadPoolExecutor(count) as threads:
            ends = [threads.submit(self._http_stream, f"tell {i}") for i in range(count)]
        return [end.result() for end in ends]

    def _http_stream(self, text):
        connection = http.client.HTTPConnection("127.0.0.1", self.ports["http"], timeout=PATIENCE_S)
        with contextlib.closing(connection):
            body = json.dumps({"text_input": text, "stream": True, **WHOLE})
            connection.request("POST", "/v2/models/spec_ensemble/generate_stream", body)
            events = [line for line in connection.getresponse() if line.startswith(b"data: ")]
        return json.loads(events[-1].removeprefix(b"data: "))["finish_reason"]

    def endpoint_status(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.ports["openai"], timeout=5)
        with contextlib.suppress(OSError), contextlib.closing(connection):
            connection.request("GET", "/health")
            return connection.getresponse().status
        return None

    def assert_nothing_is_left(self):
        wait_for(lambda: not find_stubs(self.prefix), poll_s=0.1)
        wait_for(lambda: not list(Path("/dev/shm").glob(f"{self.prefix}*")), poll_s=0.1)


@pytest.fixture(scope="module")
def serve(checkpoint, tmp_path_factory):
    """`kimi serve`. The last of its tests ends it."""
    folder = tmp_path_factory.mktemp("serve")
    ports = {name: free_port() for name in ("http", "grpc", "metrics", "openai")}
    log = folder / "serve.log"
    command = [sys.executable, "-m", "kimi_backend.cli.main", "serve", f"--checkpoint={checkpoint}"]
    command += [f"--draft={checkpoint / 'draft'}", f"--kv-tokens={ENDLESS_KV_TOKENS}"]
    command += [f"--max-model-len={ENDLESS_MODEL_LEN}"]
    command += ["--speculation-policy=fixed", f"--log-file={folder / 'server.log'}"]
    command += [f"--{name}-port={port}" for name, port in ports.items()]
    with log.open("wb") as sink:
        environment = {**os.environ, "KIMI_ADMIN_SECRET": SECRET}
        process = subprocess.Popen(
            ended_with_tests(command),
            env=environment,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
            preexec_fn=allow_few_descriptors,
        )
    one = Serve(process, ports, log)
    try:
        wait_for(lambda: one.endpoint_status() == 200, poll_s=0.1)
        yield one
    finally:
        one.client.close()
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_drafting(client):
    with contextlib.suppress(KimiClientError):
        return client.generate(text_input="x", max_tokens=8, ignore_eos=True).speculation is not None
    return False


def control(serve, model, action):
    url = f"http://127.0.0.1:{serve.ports['http']}/v2/repository/models/{model}/{action}"
    request = urllib.request.Request(url, data=b"{}", method="POST", headers=admin_headers(SECRET))
    urllib.request.urlopen(request, timeout=PATIENCE_S).close()


def test_idle_connections_beyond_the_soft_limit_of_the_start_hold_nobody_up(serve):
    assert f"open files: {FEW_DESCRIPTORS} were allowed" in serve.log.read_text()
    with contextlib.ExitStack() as idle:
        for port in (serve.ports["http"], serve.ports["openai"]):
            for _ in range(2 * FEW_DESCRIPTORS):
                idle.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
        assert serve.http_streams(1) == ["length"]
        assert serve.endpoint_status() == 200


def test_the_server_gives_the_memory_of_large_requests_back(serve):
    pid = next(stub.pid for stub in find_stubs(serve.prefix) if stub.model == "spec_ensemble")
    assert f"{LARGE_BYTES_VARIABLE}={LARGE_BYTES}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def test_killed_runners_come_back_by_themselves(serve):
    """The draft costs no stream; the target ends its streams with an error. Then the endpoint's turn. A model that was
    unloaded is not taken for dead."""
    control(serve, "eagle3_draft", "unload")
    wait_for(lambda: not [s for s in find_stubs(serve.prefix) if s.model == "eagle3_draft"], poll_s=0.1)
    time.sleep(2.5)
    assert "watchdog" not in serve.log.read_text(), "it was loaded again"
    control(serve, "eagle3_draft", "load")
    wait_for(lambda: is_drafting(serve.client), poll_s=0.1)
    streams = serve.streams(4, WHOLE)
    with ThreadPoolExecutor(1) as thread:
        over_http = thread.submit(serve.http_streams, 8)
        serve.kill("eagle3_draft")
        assert [stream.result().num_output_tokens for stream in streams] == [WHOLE["max_tokens"]] * 4
        assert over_http.result() == ["length"] * 8
    wait_for(lambda: is_drafting(serve.client), poll_s=0.1)
    streams = serve.streams(4)
    serve.kill("kimi_target")
    for stream in streams:
        with pytest.raises(ServerFailed, match="has died"):
            stream.result()
    wait_for(lambda: is_drafting(serve.client), poll_s=0.1)
    for model in ("eagle3_draft", "kimi_target"):
        wait_for(lambda word=f"watchdog: {model}: loaded again": word in serve.log.read_text(), serve.log.read_text)
    (endpoint,) = (
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and f"--port={serve.ports['openai']}".encode() in _command(entry)
    )
    os.kill(endpoint, signal.SIGKILL)
    wait_for(lambda: "the OpenAI endpoint ended by itself with code -9" in serve.log.read_text(), poll_s=0.1)
    wait_for(lambda: serve.endpoint_status() == 200, poll_s=0.1)
    assert serve.process.poll() is None


def _command(entry):
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""


def test_without_the_orchestrator_all_streams_end_and_so_does_the_server(serve):
    """The last test of this server."""
    streams = serve.streams(8)
    connection = http.client.HTTPConnection("127.0.0.1", serve.ports["openai"], timeout=PATIENCE_S)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "tell", "stream": True, **ENDLESS}))
    reply = connection.getresponse()
    reply.readline()
    serve.kill("spec_ensemble")
    for stream in streams:
        with pytest.raises(ServerUnreachable):
            stream.result()
    assert b'"error"' in reply.read()
    connection.close()
    assert serve.process.wait(PATIENCE_S) == 1
    said = serve.log.read_text()
    assert re.search(ENDED_BY_WATCHDOG, said) or "exited by itself with code -6" in said, said
    serve.assert_nothing_is_left()


def test_the_start_script_has_a_watchdog_too(checkpoint, tmp_path):
    variables = {
        "KIMI_CHECKPOINT": str(checkpoint),
        "KIMI_DRAFT": str(checkpoint / "draft"),
        "KIMI_DEVICE": "cpu",
        "KIMI_KV_TOKENS": str(ENDLESS_KV_TOKENS),
        "KIMI_MAX_MODEL_LEN": str(ENDLESS_MODEL_LEN),
    }
    with started(tmp_path, variables) as server:
        server.wait_until_healthy()
        one = Serve(server.process, {"http": server.http, "grpc": server.grpc}, server.log)
        streams = one.streams(4)
        one.kill("spec_ensemble")
        for stream in streams:
            with pytest.raises(ServerUnreachable):
                stream.result()
        code = server.process.wait(PATIENCE_S)
        assert (code == 137 and re.search(ENDED_BY_WATCHDOG, server.log.read_text())) or code == 134
        one.assert_nothing_is_left()
        one.client.close()
