"""Runners in two processes whose steps wait for each other, behind the real server: nothing hangs, whoever goes."""

import os
import shutil
import signal
import time

import pytest

from kimi_backend.hosting.settings_to_server import find_model_repository
from kimi_client import KimiClient, ServerFailed
from support.board_servers import num_followed, write_models
from support.server_process import running_server, serving_settings, stub_pids
from support.streams import control, generate_when_back, reload

FOLLOWS = "target and draft wait for each other on the GPU"
FIELDS = [
    {"text_input": f"tell {i}", "max_tokens": 60, "ignore_eos": True, "seed": i, "temperature": float(i % 2)}
    for i in range(4)
]


@pytest.fixture
def board_server(checkpoint, tmp_path):
    repository = tmp_path / "models"
    shutil.copytree(find_model_repository(), repository)
    write_models(repository, tmp_path)
    chosen = serving_settings(checkpoint, max_num_seqs=4, max_speculative_tokens=3, capture_batch_sizes="4")
    with running_server(chosen, tmp_path, repository) as server:
        yield server


@pytest.fixture
def client(board_server):
    return KimiClient(f"localhost:{board_server.ports.grpc}")


def texts(client, **changes):
    streams = [client.stream(**{**fields, **changes}) for fields in FIELDS]
    return [stream.result().text for stream in streams]


def wait_until_it_follows(client, folder, before):
    deadline = time.monotonic() + 60
    while num_followed(folder) <= before:
        generate_when_back(client, text_input="x", max_tokens=8, ignore_eos=True)
        assert time.monotonic() < deadline, "no draft follows"
        time.sleep(0.1)


def test_the_text_is_that_without_speculation(client, tmp_path):
    expected = texts(client, num_speculative_tokens=0)
    assert num_followed(tmp_path) == 0
    assert texts(client, num_speculative_tokens=3) == expected
    assert num_followed(tmp_path) > 40
    assert (tmp_path / "server.log").read_text().count(FOLLOWS) == 1


@pytest.mark.parametrize("model", ["eagle3_draft", "kimi_target"])
def test_a_killed_runner_holds_nobody_up_and_follows_again(board_server, client, tmp_path, model):
    expected = texts(client, num_speculative_tokens=0)
    streams = [client.stream(**{**fields, "max_tokens": 300}) for fields in FIELDS]
    for stream in streams:
        next(iter(stream))
    before = num_followed(tmp_path)
    while num_followed(tmp_path) < before + 3:
        time.sleep(0.01)
    os.kill(stub_pids(board_server)[model], signal.SIGKILL)
    start = time.monotonic()
    if model == "eagle3_draft":
        assert [stream.result().num_output_tokens for stream in streams] == [300] * 4
    else:
        for stream in streams:
            with pytest.raises(ServerFailed, match=r"kimi_target: its process .* has died"):
                stream.result()
        assert time.monotonic() - start < 3
    reload(board_server, model)
    wait_until_it_follows(client, tmp_path, num_followed(tmp_path))
    assert texts(client) == expected
    assert (tmp_path / "server.log").read_text().count(FOLLOWS) == 2


def test_unloaded_runners_cancelled_streams_and_a_new_engine(board_server, client, tmp_path):
    expected = texts(client, num_speculative_tokens=0)
    streams = [client.stream(**{**fields, "max_tokens": 300}) for fields in FIELDS]
    for stream in streams:
        next(iter(stream))
    for stream in streams[:2]:
        stream.cancel()
    control(board_server, "eagle3_draft", "unload")
    assert [stream.result().num_output_tokens for stream in streams[2:]] == [300] * 2
    control(board_server, "eagle3_draft", "load")
    wait_until_it_follows(client, tmp_path, num_followed(tmp_path))
    for model in ("kimi_target", "spec_ensemble"):
        control(board_server, model, "unload")
        control(board_server, model, "load")
        wait_until_it_follows(client, tmp_path, num_followed(tmp_path))
        assert texts(client) == expected
