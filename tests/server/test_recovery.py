"""Runners that fail, are killed or are reloaded; models unloaded under load. Each test has a server of its own."""

import os
import shutil
import signal
import time

import pytest

from kimi_backend.hosting.settings_to_server import find_model_repository
from kimi_client import KimiClient, KimiClientError
from support.server_process import MAX_MODEL_LEN, running_server, serving_settings, stub_pids
from support.streams import control, generate_when_back, reload

LONG = {"max_tokens": MAX_MODEL_LEN - 16, "ignore_eos": True, "seed": 1}


@pytest.fixture
def own_server(checkpoint, tmp_path):
    with running_server(serving_settings(checkpoint), tmp_path) as server:
        yield server


def start_streams(client, number):
    streams = [client.stream(text_input=f"tell {i}", **LONG) for i in range(number)]
    for stream in streams:
        next(iter(stream))
    return streams


def ends(streams):
    """How each stream ended, with the seconds until the last did."""
    start = time.monotonic()
    results = []
    for stream in streams:
        try:
            results.append(stream.result().finish_reason)
        except KimiClientError as error:
            results.append(type(error).__name__)
    return results, time.monotonic() - start


def test_a_killed_draft_costs_no_request_and_comes_back(own_server):
    client = KimiClient(f"localhost:{own_server.ports.grpc}")
    fields = {"text_input": "tell 0", "max_tokens": 200, "ignore_eos": True, "seed": 1}
    expected = client.generate(**fields, num_speculative_tokens=0).text
    stream = client.stream(**fields)
    next(iter(stream))
    os.kill(stub_pids(own_server)["eagle3_draft"], signal.SIGKILL)
    assert stream.result().text == expected
    without = client.generate(**fields)
    assert without.text == expected
    reload(own_server, "eagle3_draft")
    deadline = time.monotonic() + 60
    while client.generate(text_input="x", max_tokens=8, ignore_eos=True).speculation is None:
        assert time.monotonic() < deadline, "speculation stayed off"
        time.sleep(0.5)
    assert client.generate(**fields).text == expected


def test_a_killed_target_ends_or_resumes_every_request_and_comes_back(own_server):
    client = KimiClient(f"localhost:{own_server.ports.grpc}")
    fields = {"text_input": "tell 0", "max_tokens": 64, "ignore_eos": True, "seed": 1}
    expected = client.generate(**fields).text
    streams = start_streams(client, 4)
    os.kill(stub_pids(own_server)["kimi_target"], signal.SIGKILL)
    reasons, seconds = ends(streams)
    assert set(reasons) <= {"length", "ServerFailed", "ServerBusy"}
    # Sooner than Triton Server itself, which takes a second to notice that a stub is gone.
    assert seconds < 1
    reload(own_server, "kimi_target")
    assert generate_when_back(client, **fields).text == expected


RAISING_MODEL = """
from pathlib import Path

from kimi_backend.serving.target_server import TargetServer


class FaultyServer(TargetServer):
    def _launch(self, plan):
        if Path({trigger!r}).exists():
            raise RuntimeError("planted fault")
        super()._launch(plan)


class TritonPythonModel:
    def initialize(self, args):
        self.server = FaultyServer.from_model_args(args)

    def execute(self, requests):
        return self.server.run(requests)

    def finalize(self):
        self.server.close()
"""


def test_a_target_that_raises_fails_its_requests_and_serves_again(checkpoint, tmp_path):
    trigger = tmp_path / "raise"
    repository = tmp_path / "models"
    shutil.copytree(find_model_repository(), repository)
    (repository / "kimi_target/1/model.py").write_text(RAISING_MODEL.format(trigger=str(trigger)))
    settings = serving_settings(checkpoint)
    with running_server(settings, tmp_path, model_repository=repository) as server:
        client = KimiClient(f"localhost:{server.ports.grpc}")
        fields = {"text_input": "tell 0", "max_tokens": 48, "ignore_eos": True, "seed": 1}
        expected = client.generate(**fields).text
        streams = start_streams(client, 4)
        trigger.touch()
        reasons, seconds = ends(streams)
        assert set(reasons) == {"ServerFailed"}
        assert seconds < 1
        trigger.unlink()
        assert generate_when_back(client, **fields).text == expected


def test_unloading_the_orchestrator_ends_every_stream(own_server):
    client = KimiClient(f"localhost:{own_server.ports.grpc}")
    streams = start_streams(client, 8)
    control(own_server, "spec_ensemble", "unload")
    reasons, _ = ends(streams)
    assert len(reasons) == 8
    assert set(reasons) <= {"RequestCancelled", "length", "cancelled", "ServerFailed", "ServerBusy"}
    control(own_server, "spec_ensemble", "load")
    assert generate_when_back(client, text_input="x", max_tokens=4).num_output_tokens == 4


def test_an_orchestrator_that_is_loaded_while_another_is_unloaded_has_the_runners_alone(own_server):
    """The streams of the one that leaves end; neither writes into the other's KV blocks."""
    client = KimiClient(f"localhost:{own_server.ports.grpc}")
    fields = [{"text_input": f"tell {i}", "max_tokens": 40, "ignore_eos": True, "seed": i} for i in range(8)]
    expected = [client.generate(**one).text for one in fields]
    for _ in range(3):
        leaving = start_streams(client, 8)
        control(own_server, "spec_ensemble", "unload")
        control(own_server, "spec_ensemble", "load")
        assert generate_when_back(client, **fields[0]).text == expected[0]
        running = [client.stream(**one) for one in fields]
        assert [stream.result().text for stream in running] == expected
        reasons, seconds = ends(leaving)
        assert seconds < 1
        assert set(reasons) <= {"RequestCancelled", "cancelled"}
