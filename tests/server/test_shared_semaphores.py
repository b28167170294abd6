"""Runners in two processes whose steps wait for each other, behind the real server: nothing hangs, whoever goes."""

import os
import shutil
import signal

import pytest

from kimi_backend.hosting.settings_to_server import find_model_repository
from kimi_client import KimiClient, ServerFailed
from support.array_servers import num_overlapped, write_models
from support.server_process import ENDLESS_KV_TOKENS, ENDLESS_MODEL_LEN, running_server, serving_settings, stub_pids
from support.streams import control, generate_when_back, reload
from support.waiting import PATIENCE_S, wait_for

WAITS_ON_GPU = "target and draft wait for each other on the GPU"
FIELDS = [
    {"text_input": f"tell {i}", "max_tokens": 60, "ignore_eos": True, "seed": i, "temperature": float(i % 2)}
    for i in range(4)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of the server's log and of what its runners note."""
    return tmp_path_factory.mktemp("semaphores")


@pytest.fixture(scope="module")
def sharing_server(checkpoint, folder):
    """Each test leaves it serving, with drafts that overlap their verifies."""
    repository = folder / "models"
    shutil.copytree(find_model_repository(), repository)
    write_models(repository, folder)
    chosen = serving_settings(
        checkpoint,
        max_num_seqs=4,
        max_speculative_tokens=3,
        capture_batch_sizes="4",
        max_model_len=ENDLESS_MODEL_LEN,
        kv_tokens=ENDLESS_KV_TOKENS,
    )
    with running_server(chosen, folder, repository) as server:
        yield server


@pytest.fixture
def client(sharing_server, folder):
    with KimiClient(f"localhost:{sharing_server.ports.grpc}", timeout_s=PATIENCE_S) as connected:
        wait_until_steps_overlap(connected, folder, num_overlapped(folder))
        yield connected


def times_met(folder):
    """Count the times that the runners met, by the log."""
    return (folder / "server.log").read_text().count(WAITS_ON_GPU)


def wait_until_met(folder, count):
    """Their words reach the log some time later."""
    wait_for(lambda: times_met(folder) >= count, f"they met {times_met(folder)} times, {count} is right")
    assert times_met(folder) == count


def texts(client, **changes):
    streams = [client.stream(**{**fields, **changes}) for fields in FIELDS]
    return [stream.result().text for stream in streams]


def wait_until_steps_overlap(client, folder, before):
    def overlaps():
        generate_when_back(client, text_input="x", max_tokens=8, ignore_eos=True)
        return num_overlapped(folder) > before

    wait_for(overlaps, "no steps overlap", poll_s=0.1)


def test_the_text_is_that_without_speculation(client, folder):
    expected = texts(client, num_speculative_tokens=0)
    before = num_overlapped(folder)
    assert texts(client, num_speculative_tokens=0) == expected
    assert num_overlapped(folder) == before
    assert texts(client, num_speculative_tokens=3) == expected
    assert num_overlapped(folder) > before + 40
    wait_until_met(folder, 1)


@pytest.mark.parametrize("model", ["eagle3_draft", "kimi_target"])
def test_a_killed_runner_holds_nobody_up_and_steps_overlap_again(sharing_server, client, folder, model):
    met_before = times_met(folder)
    expected = texts(client, num_speculative_tokens=0)
    num_tokens = 300 if model == "eagle3_draft" else ENDLESS_MODEL_LEN - 32
    streams = [client.stream(**{**fields, "max_tokens": num_tokens}) for fields in FIELDS]
    for stream in streams:
        next(iter(stream))
    before = num_overlapped(folder)
    wait_for(lambda: num_overlapped(folder) >= before + 3)
    os.kill(stub_pids(sharing_server)[model], signal.SIGKILL)
    if model == "eagle3_draft":
        assert [stream.result().num_output_tokens for stream in streams] == [300] * 4
    else:
        for stream in streams:
            with pytest.raises(ServerFailed, match=r"kimi_target: its process .* has died"):
                stream.result()
    reload(sharing_server, model)
    wait_until_steps_overlap(client, folder, num_overlapped(folder))
    assert texts(client) == expected
    wait_until_met(folder, met_before + 1)


def test_unloaded_runners_cancelled_streams_and_a_new_engine(sharing_server, client, folder):
    expected = texts(client, num_speculative_tokens=0)
    streams = [client.stream(**{**fields, "max_tokens": 300}) for fields in FIELDS]
    for stream in streams:
        next(iter(stream))
    for stream in streams[:2]:
        stream.cancel()
    control(sharing_server, "eagle3_draft", "unload")
    assert [stream.result().num_output_tokens for stream in streams[2:]] == [300] * 2
    control(sharing_server, "eagle3_draft", "load")
    wait_until_steps_overlap(client, folder, num_overlapped(folder))
    for model in ("kimi_target", "spec_ensemble"):
        control(sharing_server, model, "unload")
        control(sharing_server, model, "load")
        wait_until_steps_overlap(client, folder, num_overlapped(folder))
        assert texts(client) == expected
