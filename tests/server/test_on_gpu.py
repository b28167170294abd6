"""The real Triton Server over kimi-nano on a GPU: both ways of handing aux hidden states over, through kills of either
runner. The plain kernels, so that every text can be compared with the one in process."""

import os
import re
import shutil
import signal
import time
import urllib.request

import pytest

from kimi_backend.hosting.settings_to_server import find_model_repository
from kimi_client import KimiClient, ServerFailed
from support.nano_requests import MAX_TOKENS, request_fields, run_in_process, run_served
from support.nano_runs import BLOCK_SIZE, MAX_MODEL_LEN, nano_settings
from support.server_process import running_server, stub_pids
from support.start_script import started
from support.streams import control, reload, wait_for_speculation

pytestmark = pytest.mark.gpu

KILLED_TOKENS = 150
"""The length of a stream that is under way when a runner is killed."""
KV_TOKENS = 16_384
WAITS_ON_GPU = "target and draft wait for each other on the GPU"
SHARED, SENT = "aux hidden states stay on the GPU", "aux hidden states travel as tensors"
FIELDS = request_fields((3, 7, 1, 5))


def settings(**changes):
    return nano_settings(**{"kernels": "plain", "kv_tokens": KV_TOKENS, **changes})


@pytest.fixture(scope="module")
def expected():
    """Texts and accepted tokens, in process."""
    return run_in_process(settings(), FIELDS)


def served(client):
    return run_served(client, FIELDS)


@pytest.mark.parametrize("aux_transfer", ["ipc", "tensor"])
def test_served_tokens_and_acceptance_are_those_in_process(tmp_path, expected, aux_transfer):
    chosen = settings(aux_transfer=aux_transfer)
    with running_server(chosen, tmp_path) as server:
        client = KimiClient(f"localhost:{server.ports.grpc}")
        assert served(client) == expected
        assert served(client) == expected  # from the prefix cache
        log = (tmp_path / "server.log").read_text()
        assert (SHARED in log) == (aux_transfer == "ipc")
        assert (SENT in log) == (aux_transfer == "tensor")


def captured(**changes):
    """Steps of the Triton-language kernels, whose last bits follow the batch: their texts are not compared."""
    return settings(kernels="triton", aux_transfer="ipc", capture_batch_sizes="8", **changes)


def test_captured_drafts_overlap_their_verifies(tmp_path):
    """They must be accepted as often as those that wait for the verify, and the texts of requests that run alone are
    equal but for roundings of the draft's, which move a token to another row of a verify."""
    accepted, alone = {}, {}
    for chosen in ("off", "auto"):
        folder = tmp_path / chosen
        folder.mkdir()
        given = captured(shared_semaphores=chosen)
        with running_server(given, folder) as server:
            client = KimiClient(f"localhost:{server.ports.grpc}")
            alone[chosen] = [client.generate(**fields, return_token_ids=True).token_ids for fields in FIELDS]
            results = [served(client) for _ in range(3)]
            accepted[chosen] = sum(count for result in results for _, count in result)
            assert (WAITS_ON_GPU in (folder / "server.log").read_text()) == (chosen == "auto")
    assert accepted["auto"] > 0.8 * accepted["off"] > 0
    num_equal = sum(waiting == overlapping for waiting, overlapping in zip(alone["off"], alone["auto"], strict=True))
    assert num_equal >= 0.7 * len(FIELDS), f"{num_equal} of {len(FIELDS)} texts are equal"


def test_killed_runners_hold_nobody_up_and_overlap_again(tmp_path):
    """Killed while a stream of the other waits for them, most likely."""
    chosen = captured()
    with running_server(chosen, tmp_path) as server:
        client = KimiClient(f"localhost:{server.ports.grpc}")
        served(client)
        for count, model in enumerate(("eagle3_draft", "kimi_target", "eagle3_draft")):
            streams = [client.stream(**{**fields, "max_tokens": KILLED_TOKENS}) for fields in FIELDS]
            for stream in streams:
                next(iter(stream))
            os.kill(stub_pids(server)[model], signal.SIGKILL)
            start = time.monotonic()
            if model == "eagle3_draft":
                assert [stream.result().num_output_tokens for stream in streams] == [KILLED_TOKENS] * len(streams)
            else:
                for stream in streams:
                    with pytest.raises(ServerFailed):
                        stream.result()
            assert time.monotonic() - start < 8
            reload(server, model)
            wait_for_speculation(client)
            assert all(accepted > 0 for _, accepted in served(client))
            assert (tmp_path / "server.log").read_text().count(WAITS_ON_GPU) == count + 2


def test_overlapped_steps_give_the_texts_of_lockstep(tmp_path):
    """One request after another, without speculation: the same captured steps, whoever launches them when."""
    texts = {}
    for async_scheduling in ("false", "true"):
        folder = tmp_path / async_scheduling
        folder.mkdir()
        chosen = settings(kernels="triton", draft="", async_scheduling=async_scheduling, capture_batch_sizes="1,8")
        with running_server(chosen, folder) as server:
            client = KimiClient(f"localhost:{server.ports.grpc}")
            alone = [{**fields, "num_speculative_tokens": 0, "return_token_ids": True} for fields in FIELDS]
            texts[async_scheduling] = [client.generate(**fields).token_ids for fields in alone]
            together = [client.stream(**fields) for fields in alone]
            assert {len(stream.result().token_ids) for stream in together} == {MAX_TOKENS}
    assert texts["true"] == texts["false"]


def test_killed_runners_come_back_and_share_again(tmp_path, expected):
    chosen = settings(aux_transfer="ipc")
    with running_server(chosen, tmp_path) as server:
        client = KimiClient(f"localhost:{server.ports.grpc}")
        for model in ("eagle3_draft", "kimi_target"):
            stream = client.stream(**{**FIELDS[0], "max_tokens": KILLED_TOKENS})
            next(iter(stream))
            os.kill(stub_pids(server)[model], signal.SIGKILL)
            if model == "eagle3_draft":
                assert stream.result().num_output_tokens == KILLED_TOKENS
            else:
                with pytest.raises(ServerFailed):
                    stream.result()
            opened = (tmp_path / "server.log").read_text().count(SHARED)
            reload(server, model)
            wait_for_speculation(client)
            assert served(client) == expected
            assert (tmp_path / "server.log").read_text().count(SHARED) > opened, "the buffer was not opened again"


def test_unloaded_runners_free_the_gpu_and_come_back(tmp_path, expected):
    """Orderly, not killed: the buffer is unmapped by one process and freed by the other."""
    chosen = settings(aux_transfer="ipc")
    with running_server(chosen, tmp_path) as server:
        client = KimiClient(f"localhost:{server.ports.grpc}")
        assert served(client) == expected
        for _ in range(2):
            for model in ("kimi_target", "eagle3_draft"):
                control(server, model, "unload")
            for model in ("kimi_target", "eagle3_draft"):
                control(server, model, "load")
        wait_for_speculation(client)
        assert served(client) == expected


POISONED_MODEL = """
from kimi_backend.serving import {role}_server as module

load = module.load_{role}_runner


def poisoned(settings):
    runner = load(settings)
    runner._pool.tensor.fill_(float("nan"))
    return runner


module.load_{role}_runner = poisoned


class TritonPythonModel:
    def initialize(self, args):
        self.server = module.{name}Server.from_model_args(args)

    def execute(self, requests):
        return self.server.run(requests)

    def finalize(self):
        self.server.close()
"""


@pytest.mark.parametrize("num_blocks", [24, 100_000])
def test_poisoned_pools_with_cancelled_neighbours(tmp_path, expected, num_blocks):
    """24 blocks hold two or three of the requests: the others wait or are preempted."""
    repository = tmp_path / "models"
    shutil.copytree(find_model_repository(), repository)
    for model, role in (("kimi_target", "target"), ("eagle3_draft", "draft")):
        (repository / model / "1/model.py").write_text(POISONED_MODEL.format(role=role, name=role.capitalize()))
    longest = min(num_blocks * BLOCK_SIZE, MAX_MODEL_LEN)
    chosen = settings(kv_tokens=num_blocks * BLOCK_SIZE, max_model_len=longest)
    with running_server(chosen, tmp_path, repository) as server:
        client = KimiClient(f"localhost:{server.ports.grpc}")
        neighbours = [client.stream(**{**FIELDS[i], "seed": 90 + i, "max_tokens": 200}) for i in range(4)]
        streams = [client.stream(**fields, return_token_ids=True) for fields in FIELDS]
        for neighbour in neighbours:
            next(iter(neighbour))
            neighbour.cancel()
        assert [list(stream.result().token_ids) for stream in streams] == [tokens for tokens, _ in expected]
        metrics = urllib.request.urlopen(f"http://localhost:{server.ports.metrics}/metrics", timeout=10).read().decode()
        (blocks,) = re.findall(r'^kimi_kv_blocks\{.*pool="target".*\} (\S+)$', metrics, re.MULTILINE)
        assert float(blocks) == num_blocks


def test_the_start_script_serves_on_a_gpu_and_ends(tmp_path):
    names = ("checkpoint", "draft", "device", "max_model_len", "block_size")
    variables = {f"KIMI_{name.upper()}": str(getattr(settings(), name)) for name in names}
    variables |= {"KIMI_KV_TOKENS": str(KV_TOKENS), "KIMI_KERNELS": "plain"}
    with started(tmp_path, variables) as server:
        server.wait_until_healthy()
        assert KimiClient(f"localhost:{server.grpc}").generate(text_input="x", max_tokens=4).num_output_tokens > 0
        server.process.terminate()
        assert server.process.wait(60) == 0
