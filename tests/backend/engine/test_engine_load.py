"""Many clients at once, some of whom leave, time out or stop early, while runners come and go."""

import random
import threading
import time
from dataclasses import replace

import pytest

from kimi_backend.engine.engine import Engine
from kimi_backend.errors import CapacityError
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.request import FinishReason, GenerateRequest
from support.letter_tokenizer import LetterTokenizer
from support.plain_decoding import decode_plainly
from support.random_requests import random_requests
from support.recording_client import RecordingClient
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedDraft, ScriptedTarget, describe
from support.waiting import PATIENCE_S, wait_for

VOCAB = 32
SCRIPT = LogitScript(VOCAB)
NUM_REQUESTS = 160


def drawn_requests(rng: random.Random) -> list[GenerateRequest]:
    requests = []
    for request in random_requests(rng, NUM_REQUESTS, VOCAB, longest_prompt=16, longest_output=30):
        fate = rng.random()
        if fate < 0.2:
            stop = "".join(chr(ord("A") + rng.randrange(VOCAB)) for _ in range(rng.choice((1, 2))))
            request = replace(request, sampling=replace(request.sampling, stop=(stop,)))
        elif fate < 0.3:
            request = replace(request, timeout_s=rng.random() * 0.5 + 1e-3)
        requests.append(request)
    return requests


def submit_patiently(engine: Engine, request: GenerateRequest, client: RecordingClient) -> None:
    """Try again while a runner is away or the queue is full, and cancel every fifth request."""
    while True:
        try:
            handle = engine.submit(request, client)
            break
        except CapacityError:
            time.sleep(0.02)
    if int(request.request_id.removeprefix("r")) % 5 == 0:
        time.sleep(0.01)
        handle.cancel()


def held(engine: Engine) -> tuple[int, int, int]:
    """Requests that run, that wait, and the target's blocks that they hold."""
    statistics = engine.statistics()
    return statistics.num_running, statistics.num_waiting, statistics.target_blocks_held


@pytest.mark.parametrize("seed", range(2))
def test_every_request_ends_once_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {"num_blocks": 80, "max_model_len": 64}
    target = ScriptedTarget(describe("target", SCRIPT, **sizes), SCRIPT)
    draft = ScriptedDraft(describe("draft", SCRIPT, **sizes), SCRIPT)
    engine = Engine(
        target,
        draft,
        settings=SchedulerSettings(max_num_seqs=12, max_num_batched_tokens=64, max_queue_size=40),
        tokenizer=LetterTokenizer(VOCAB),
    )
    engine.start()
    engine.wait_until_ready(PATIENCE_S)
    requests = drawn_requests(rng)
    clients = [RecordingClient() for _ in requests]
    threads = [
        threading.Thread(target=lambda part: [submit_patiently(engine, *pair) for pair in part], args=(part,))
        for part in (list(zip(requests, clients, strict=True))[i::8] for i in range(8))
    ]
    for thread in threads:
        thread.start()
    for break_it in (draft.restart, target.restart, draft.restart):
        time.sleep(0.1)
        break_it()
    for thread in threads:
        thread.join()
    for client in clients:
        client.wait()
    # A client hears of its end before what the request held is given back.
    wait_for(lambda: held(engine) == (0, 0, 0), "requests that ended hold something still")
    engine.stop()
    assert draft.violation is None
    expected = decode_plainly(SCRIPT, requests, eos_token_ids=frozenset(), max_model_len=64)
    reasons = set()
    for client, tokens in zip(clients, expected, strict=True):
        client.check()
        final = client.deltas[-1]
        assert client.token_ids == tokens[: len(client.token_ids)]
        assert client.text == "".join(chr(ord("A") + t) for t in client.token_ids)[: len(client.text)]
        if final.finish_reason is FinishReason.LENGTH:
            assert client.token_ids == tokens
        reasons.add(final.finish_reason)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED}
    assert held(engine) == (0, 0, 0)
    assert sum(engine.statistics().totals.num_finished.values()) == NUM_REQUESTS
