"""The server with both models on two ranks each, on a CPU: its texts, a rank that is killed, models unloaded.

`KIMI_TEST_RANKS` asks for more than two.
"""

import contextlib
import os
import signal

from kimi_client import KimiClient, ServerFailed
from support.server_process import rank_pids, running_server, serving_settings, stub_pids, wait_until_gone
from support.streams import control, generate_when_back, reload, wait_for_speculation
from support.waiting import PATIENCE_S, wait_for

FIELDS = [
    {
        "text_input": f"tell {index}",
        "max_tokens": 24,
        "ignore_eos": True,
        "seed": index,
        "temperature": float(index % 2),
        "num_speculative_tokens": k,
        "return_token_ids": True,
    }
    for index, k in enumerate((3, 0, 7, 1))
]
LONG = {"text_input": "tell 0", "max_tokens": 300, "ignore_eos": True, "seed": 1}
NUM_RANKS = int(os.environ.get("KIMI_TEST_RANKS", "2"))


def texts(client):
    streams = [client.stream(**fields) for fields in FIELDS]
    return [list(stream.result().token_ids) for stream in streams]


def test_ranks_of_each_model(checkpoint, server, tmp_path):
    with KimiClient(f"localhost:{server.ports.grpc}") as client:
        expected = texts(client)
    settings = serving_settings(checkpoint, tensor_parallel_size=NUM_RANKS, kernels="plain")
    with (
        running_server(settings, tmp_path) as parallel,
        KimiClient(f"localhost:{parallel.ports.grpc}") as client,
    ):
        stubs = stub_pids(parallel)
        ranks = {model: rank_pids(stubs[model]) for model in ("kimi_target", "eagle3_draft")}
        assert all(len(found) == NUM_RANKS - 1 for found in ranks.values())
        assert texts(client) == expected

        # A rank of the draft is killed: no request is lost.
        stream = client.stream(**LONG)
        next(iter(stream))
        os.kill(ranks["eagle3_draft"][0], signal.SIGKILL)
        assert stream.result().num_output_tokens == LONG["max_tokens"]
        wait_until_gone([stubs["eagle3_draft"]])
        reload(parallel, "eagle3_draft")

        # A rank of the target: its requests end with an error at once, then it comes back.
        stream = client.stream(**LONG, timeout_s=PATIENCE_S)
        next(iter(stream))
        os.kill(ranks["kimi_target"][0], signal.SIGKILL)
        with contextlib.suppress(ServerFailed):
            assert stream.result().num_output_tokens == LONG["max_tokens"], "it was done before"
        reload(parallel, "kimi_target")
        generate_when_back(client, **FIELDS[0])
        wait_for_speculation(client)
        assert texts(client) == expected
        log = tmp_path / "server.log"
        wait_for(lambda: log.read_text().count("this process ends") == 2, log.read_text)

        # Unloaded in order, and a model's process killed: nothing is left of either's ranks.
        stubs = stub_pids(parallel)
        ranks = {model: rank_pids(stubs[model]) for model in ("kimi_target", "eagle3_draft")}
        control(parallel, "eagle3_draft", "unload")
        wait_until_gone(ranks["eagle3_draft"])
        os.kill(stubs["kimi_target"], signal.SIGKILL)
        wait_until_gone(ranks["kimi_target"])
