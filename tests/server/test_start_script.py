"""docker/start.sh and docker/smoke.sh as the container runs them, over the real Triton Server without the container."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from kimi_backend.hosting.embedded_server import free_port
from kimi_backend.processes import LARGE_BYTES, LARGE_BYTES_VARIABLE
from kimi_client import KimiClient, RequestCancelled, ServerBusy
from kimi_openai import EndpointSettings
from kimi_openai.app import Endpoint
from kimi_openai.tracing import RequestTracer
from support.openai_endpoint import running_endpoint
from support.otlp_receiver import collecting, receiving
from support.raw_streams import raw_input
from support.server_process import ENDLESS, ENDLESS_KV_TOKENS, ENDLESS_MODEL_LEN, FEW_DESCRIPTORS, stub_pids
from support.start_script import ROOT, START, started
from support.waiting import PATIENCE_S, wait_for

SECRET = "open-sesame"


def variables(checkpoint):
    return {
        "KIMI_CHECKPOINT": str(checkpoint),
        "KIMI_DRAFT": str(checkpoint / "draft"),
        "KIMI_DEVICE": "cpu",
        "KIMI_MAX_MODEL_LEN": str(ENDLESS_MODEL_LEN),
        "KIMI_KV_TOKENS": str(ENDLESS_KV_TOKENS),
        "KIMI_ADMIN_SECRET": SECRET,
        "KIMI_DRAIN_TIMEOUT_S": "60",
        "KIMI_EXIT_TIMEOUT_S": "3",
    }


@pytest.fixture(scope="module")
def receiver():
    with receiving() as running:
        yield running


@pytest.fixture(scope="module")
def collector(receiver):
    """Its URL; what comes there arrives at `receiver`."""
    with collecting(receiver) as url:
        yield url


@pytest.fixture(scope="module")
def running(checkpoint, collector, tmp_path_factory):
    """It traces requests that come with a trace, and of the others one in two thousand million."""
    tracing = {
        "mode": "opentelemetry",
        "rate": 2**31 - 1,
        "level": "TIMESTAMPS",
        "opentelemetry,url": f"{collector}/v1/traces",
        "opentelemetry,bsp_schedule_delay": 200,
    }
    options = " ".join(f"--trace-config={name}={value}" for name, value in tracing.items())
    given = {**variables(checkpoint), "KIMI_TRITON_ARGS": options}
    with started(tmp_path_factory.mktemp("start"), given) as server:
        server.wait_until_healthy()
        yield server


def prefix_of(running):
    """A stand-in for a server, for what looks at its processes."""
    return SimpleNamespace(shm_prefix=f"kimi_{running.http}_")


def environment_of(pid):
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def smoke(port):
    command = [ROOT / "docker/smoke.sh", f"localhost:{port}"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, env={**os.environ, "LC_ALL": "C"}
    )


def status_of(port, path, headers=None, data=None):
    request = urllib.request.Request(f"http://localhost:{port}/v2/{path}", headers=headers or {}, data=data)
    try:
        return urllib.request.urlopen(request, timeout=PATIENCE_S).status
    except urllib.error.HTTPError as error:
        return error.code


def test_smoke_sees_a_streamed_completion(running):
    done = smoke(running.http)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("PASS: ")


def test_smoke_fails_where_nothing_answers(running):
    done = smoke(1)
    assert done.returncode == 1
    assert "FAIL: no completion" in done.stderr


def test_health_says_that_it_speculates(running):
    done = running.health("--draft")
    assert (done.returncode, done.stdout) == (0, "healthy: it generates, with speculation\n"), done.stderr


def test_the_server_may_open_as_many_files_as_the_hard_limit_allows(running):
    model = stub_pids(prefix_of(running))["spec_ensemble"]
    limits = re.search(r"Max open files +(\d+) +(\d+)", Path(f"/proc/{model}/limits").read_text())
    assert limits[1] == limits[2]
    assert f"start.sh: open files: {FEW_DESCRIPTORS} were allowed, {limits[1]} are now" in running.log.read_text()


def test_the_server_gives_the_memory_of_large_requests_back(running):
    environment = environment_of(stub_pids(prefix_of(running))["spec_ensemble"])
    assert environment[LARGE_BYTES_VARIABLE] == str(LARGE_BYTES)


@pytest.mark.parametrize("as_container", [True, False])
def test_a_second_server_on_the_same_port_is_refused_and_takes_nothing_from_the_first(
    running, checkpoint, tmp_path, as_container
):
    regions = sorted(Path("/dev/shm").glob(f"kimi_{running.http}_*"))
    again = {**variables(checkpoint), "KIMI_HTTP_PORT": str(running.http)}
    with started(tmp_path, again, as_container=as_container) as second:
        assert second.process.wait(PATIENCE_S) == 2
        assert re.search(rf"port:? {running.http} ", second.log.read_text())
    assert sorted(Path("/dev/shm").glob(f"kimi_{running.http}_*")) == regions != []


def test_admin_apis_need_the_secret(running):
    paths = [
        ("repository/index", b"{}"),
        ("repository/models/kimi_target/unload", b"{}"),
        ("models/spec_ensemble/config", None),
        ("models/spec_ensemble/stats", None),
        ("logging", None),
        ("trace/setting", None),
        ("systemsharedmemory/status", None),
    ]
    for path, data in paths:
        assert status_of(running.http, path, data=data) == 403, path
        assert status_of(running.http, path, {"kimi-admin": "wrong"}, data) == 403, path
    assert status_of(running.http, "models/spec_ensemble/config", {"kimi-admin": SECRET}) == 200
    client = grpcclient.InferenceServerClient(f"localhost:{running.grpc}")
    with pytest.raises(InferenceServerException, match="restricted"):
        client.get_model_config("spec_ensemble")
    config = client.get_model_config("spec_ensemble", headers={"triton-grpc-protocol-kimi-admin": SECRET})
    assert config.config.name == "spec_ensemble"
    client.close()


def test_clients_cannot_call_the_runners(running):
    file = Path(environment_of(stub_pids(prefix_of(running))["kimi_target"])["KIMI_RUNNER_SECRET_FILE"])
    assert file.stat().st_mode & 0o777 == 0o600
    client = grpcclient.InferenceServerClient(f"localhost:{running.grpc}")
    ask = raw_input("DESCRIBE", np.ones(1, np.bool_), "BOOL")
    for model in ("kimi_target", "eagle3_draft"):
        for given in ([ask], [raw_input("SECRET", np.zeros(32, np.uint8), "UINT8"), ask]):
            with pytest.raises(InferenceServerException, match="this model answers spec_ensemble alone"):
                client.infer(model, given)
    client.close()


def test_the_metrics_port_is_served(running):
    KimiClient(f"localhost:{running.grpc}").generate(text_input="hi", max_tokens=2)
    text = urllib.request.urlopen(f"http://localhost:{running.metrics}/metrics", timeout=PATIENCE_S).read().decode()
    assert "spec_decode_num_drafts_total" in text


def test_a_callers_trace_goes_on_through_the_endpoint_and_triton_server(running, receiver, collector):
    caller = "b7ad6b7169203331"
    traces = {by: f"{number:032x}" for number, by in enumerate(("endpoint", "http", "unsampled"), 1)}
    headers = {by: {"traceparent": f"00-{trace}-{caller}-01"} for by, trace in traces.items()}
    headers["unsampled"]["traceparent"] = f"00-{traces['unsampled']}-{caller}-00"
    body = {"max_tokens": 24, "seed": 1, "temperature": 0, "ignore_eos": True}
    settings = EndpointSettings(url=f"localhost:{running.grpc}")
    tracer = RequestTracer.to(collector)
    with running_endpoint(settings, Endpoint(settings, tracer)) as endpoint:
        for by in ("unsampled", "endpoint"):
            status, _, _ = endpoint.send("POST", "/v1/completions", {"prompt": "hi", **body}, headers[by])
            assert status == 200
    tracer.close()
    data = json.dumps({"text_input": "hi", "stream": True, **body}).encode()
    assert status_of(running.http, "models/spec_ensemble/generate_stream", headers["http"], data) == 200
    wanted = {("POST /v1/completions", traces["endpoint"]), ("spec_ensemble", traces["endpoint"])}
    wanted |= {("InferRequest", traces["http"])}
    found = receiver.wait_for(lambda spans: wanted <= {(span.name, span.trace_id) for span in spans})
    assert traces["unsampled"] not in {span.trace_id for span in found}
    ours = {span.name: span for span in found if span.service == "kimi-openai"}
    assert {span.trace_id for span in ours.values()} == {traces["endpoint"]}
    assert set(ours) == {"POST /v1/completions", "queue", "prefill", "rounds", "round"}
    assert ours["POST /v1/completions"].parent_id == caller
    assert ours["round"].parent_id == ours["rounds"].span_id
    by_http = {span.name: span for span in found if span.trace_id == traces["http"]}
    assert by_http["InferRequest"].parent_id == caller
    assert by_http["spec_ensemble"].parent_id == by_http["InferRequest"].span_id
    assert by_http["spec_ensemble"].events == ("REQUEST_START", "QUEUE_START", "REQUEST_END"), "timestamps alone"


def test_a_killed_draft_is_noticed_and_sigterm_leaves_nothing_behind(running):
    """The last test of this server: every model is still called ready, and without its draft it goes on serving."""

    def kill_and_look():
        kill_draft(running)
        done = running.health()
        return done if done.returncode else None  # the watchdog was faster; it takes longer each time

    done = wait_for(kill_and_look)
    assert done.returncode == 1
    # Or the watchdog was faster, and loads it again.
    assert re.search("eagle3_draft|health/ready", done.stderr), done.stderr
    with KimiClient(f"localhost:{running.grpc}") as client:
        streams = [client.stream(text_input=f"tell {i}", **ENDLESS) for i in range(16)]
        short = client.stream(text_input="tell", max_tokens=8, ignore_eos=True)
        for stream in streams:
            next(iter(stream))
        running.process.send_signal(signal.SIGTERM)
        wait_for(lambda: not client.is_ready())  # two signals at once might be one to the script
        assert short.result().num_output_tokens == 8
        running.process.send_signal(signal.SIGTERM)  # the second cuts the drain short
        for stream in streams:
            with pytest.raises(RequestCancelled, match="shutting down"):
                stream.result()
    _assert_stops_cleanly(running)


def kill_draft(server):
    with contextlib.suppress(KeyError, ProcessLookupError):  # it is not back yet
        os.kill(stub_pids(prefix_of(server))["eagle3_draft"], signal.SIGKILL)


def _assert_stops_cleanly(server):
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE_S) == 0, server.log.read_text()[-3000:]
    assert list(Path("/dev/shm").glob(f"kimi_{server.http}_*")) == []


def test_without_tritonserver_the_same_script_runs_the_embedded_one(checkpoint, tmp_path):
    """Its drain lets streams end and takes no more, until it is hurried."""
    with started(tmp_path, variables(checkpoint), as_container=False) as server:
        server.wait_until_healthy()
        assert smoke(server.http).returncode == 0
        settings = EndpointSettings(url=f"localhost:{server.grpc}")
        with KimiClient(settings.url) as client, running_endpoint(settings, Endpoint(settings)) as endpoint:
            whole = [client.stream(text_input=f"tell {i}", max_tokens=60, ignore_eos=True) for i in range(6)]
            cut = client.stream(text_input="tell", **ENDLESS)
            for stream in (*whole, cut):
                next(iter(stream))
            server.process.send_signal(signal.SIGINT)
            wait_for(lambda: not client.is_ready())
            with pytest.raises(ServerBusy):
                client.generate(text_input="x", max_tokens=1)
            status, headers, _ = endpoint.send("POST", "/v1/completions", {"prompt": "x"})
            assert (status, headers["retry-after"]) == (503, "1")
            assert endpoint.send("GET", "/health")[0] == 503
            assert [stream.result().num_output_tokens for stream in whole] == [60] * 6
            server.process.send_signal(signal.SIGINT)
            with pytest.raises(RequestCancelled, match="shutting down"):
                cut.result()
        _assert_stops_cleanly(server)
        assert "draining: no new requests, live ones have 60 s" in server.log.read_text()


def test_an_admin_secret_that_would_change_the_rule_is_refused(checkpoint, tmp_path):
    with started(tmp_path, variables(checkpoint) | {"KIMI_ADMIN_SECRET": "a:b"}) as server:
        assert server.process.wait(PATIENCE_S) == 2
        assert "KIMI_ADMIN_SECRET: letters, digits" in server.log.read_text()


@pytest.mark.parametrize(
    ("checkpoint_variable", "named"), [("", "KIMI_CHECKPOINT is empty"), ("/nowhere", "/nowhere has no config.json")]
)
def test_a_missing_checkpoint_is_one_clear_message(checkpoint_variable, named):
    environment = {"PATH": os.environ["PATH"], "KIMI_CHECKPOINT": checkpoint_variable}
    done = subprocess.run([START], env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert named in done.stderr


def test_a_removed_setting_is_named(checkpoint, tmp_path):
    """It is named before anything is started; `tritonserver` is a stand-in that would be."""
    stand_in = tmp_path / "tritonserver"
    stand_in.write_text("#!/bin/sh\nexit 9\n")
    stand_in.chmod(0o755)
    environment = {**variables(checkpoint), "PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin"}
    environment |= {f"KIMI_{name}_PORT": str(free_port()) for name in ("HTTP", "GRPC", "METRICS")}
    done = subprocess.run(
        [START], env={**environment, "KIMI_MPS": "off"}, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 2
    assert "start.sh: setting KIMI_MPS was removed: leave it out" in done.stderr
