"""The real Triton Server with kimi-nano on two GPUs: hand-over on each GPU, captured steps, ranks that are killed.

`KIMI_TEST_RANKS` asks for more than two.
"""

import logging
import os
import signal

import pytest
import torch

from kimi_client import KimiClient, ServerFailed
from support.nano_requests import MAX_TOKENS, request_fields, run_in_process, run_served
from support.nano_runs import nano_settings
from support.server_process import rank_pids, running_server, stub_pids, wait_until_gone
from support.streams import control, reload, wait_for_speculation

NUM_RANKS = int(os.environ.get("KIMI_TEST_RANKS", "2"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < NUM_RANKS, reason=f"needs {NUM_RANKS} GPUs"),
]

logger = logging.getLogger(__name__)

KILLED_TOKENS = 400
SHARED = "aux hidden states stay on the GPU"
WAITS_ON_GPU = "target and draft wait for each other on the GPU"
FIELDS = request_fields((3, 2, 1, 3))


def settings(**changes):
    values = {"kv_tokens": 16_384, "aux_transfer": "ipc", "max_speculative_tokens": 3}
    values |= {"kernels": "triton", "capture_batch_sizes": "1,8"}
    return nano_settings(**{**values, "tensor_parallel_size": NUM_RANKS, **changes})


@pytest.fixture(scope="module")
def expected():
    """Accepted draft tokens on one GPU in process, one request after another."""
    return num_accepted(run_in_process(settings(tensor_parallel_size=1), FIELDS))


def served(client):
    return run_served(client, FIELDS)


def num_accepted(results):
    return sum(accepted for _, accepted in results)


def test_killed_ranks(tmp_path):
    """One of the draft's costs no request; one of the target's ends its stream; either model comes back and shares."""
    with running_server(settings(), tmp_path) as server:
        client = KimiClient(f"localhost:{server.ports.grpc}")
        log = tmp_path / "server.log"
        wait_for_speculation(client)
        accepted = num_accepted(served(client))
        assert SHARED in log.read_text() and WAITS_ON_GPU in log.read_text()
        for model in ("eagle3_draft", "kimi_target"):
            stub = stub_pids(server)[model]
            stream = client.stream(**{**FIELDS[0], "max_tokens": KILLED_TOKENS})
            next(iter(stream))
            opened = [log.read_text().count(text) for text in (SHARED, WAITS_ON_GPU)]
            logger.info("a rank of %s is killed", model)
            os.kill(rank_pids(stub)[0], signal.SIGKILL)
            if model == "eagle3_draft":
                assert stream.result().num_output_tokens == KILLED_TOKENS
            else:
                with pytest.raises(ServerFailed):
                    stream.result()
            wait_until_gone([stub])
            logger.info("its process has ended")
            reload(server, model)
            wait_for_speculation(client)
            logger.info("it is back")
            assert num_accepted(served(client)) > 0.7 * accepted
            again = [log.read_text().count(text) for text in (SHARED, WAITS_ON_GPU)]
            assert min(now - before for now, before in zip(again, opened, strict=True)) > 0, "not opened again"


@pytest.mark.parametrize("shared_semaphores", ["auto", "off"])
def test_captured_steps(tmp_path, expected, shared_semaphores):
    """Drafts that overlap their verifies on all ranks are accepted as often as those that wait for replies."""
    with running_server(settings(shared_semaphores=shared_semaphores), tmp_path) as server:
        client = KimiClient(f"localhost:{server.ports.grpc}")
        accepted = [num_accepted(served(client)) for _ in range(3)]
        logger.info("accepted with semaphores %s: %s, in process: %d", shared_semaphores, accepted, expected)
        assert min(accepted) > 0.8 * expected > 0
        log = (tmp_path / "server.log").read_text()
        assert SHARED in log
        assert (WAITS_ON_GPU in log) == (shared_semaphores == "auto")
        plain = [{**fields, "num_speculative_tokens": 0, "return_token_ids": True} for fields in FIELDS]
        streams = [client.stream(**fields) for fields in plain]
        assert {len(stream.result().token_ids) for stream in streams} == {MAX_TOKENS}
        ranks = {model: rank_pids(pid) for model, pid in stub_pids(server).items()}
        for model in ("kimi_target", "eagle3_draft"):
            control(server, model, "unload")
            wait_until_gone(ranks[model])
