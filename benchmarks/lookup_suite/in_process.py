"""Requests to a pair in this process, on a GPU where there is one: no server or client need be installed."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from kimi_backend.config.settings import ServingSettings
from kimi_backend.engine.engine import Engine
from kimi_backend.runners.load.loading import load_pair
from kimi_backend.serving.spec_ensemble_server import scheduler_settings
from kimi_backend.types.proposer import Proposer
from kimi_backend.types.request import GenerateRequest, SamplingParams, TokenDelta
from lookup_suite.cells import Reply, Send

READY_S = 120.0


@contextmanager
def in_process(settings: ServingSettings) -> Iterator[Send]:
    """A way to send requests to the pair that the settings name."""
    target, draft = load_pair(settings)
    engine = Engine(target, draft, settings=scheduler_settings(settings))
    engine.start()
    try:
        engine.wait_until_ready(READY_S)
        yield partial(_send, engine)
    finally:
        engine.stop()


def _send(engine: Engine, requests: Sequence[dict[str, Any]], streams: int) -> tuple[list[Reply], float]:
    free, deltas = threading.Semaphore(streams), [list[TokenDelta]() for _ in requests]

    def note(delta: TokenDelta) -> None:
        deltas[int(delta.request_id)].append(delta)
        if delta.finish_reason is not None:
            free.release()

    start = time.perf_counter()
    for number, fields in enumerate(requests):
        free.acquire()
        engine.submit(_request(number, **fields), note)
    for _ in range(streams):
        free.acquire()
    seconds = time.perf_counter() - start
    replies = [_reply(of_request) for of_request in deltas]
    return replies, sum(len(reply.token_ids) for reply in replies) / seconds


def _request(
    number: int, *, input_ids: Sequence[int], proposer: str, cache_salt: str, **sampling: Any
) -> GenerateRequest:
    return GenerateRequest(
        request_id=str(number),
        prompt_token_ids=tuple(input_ids),
        sampling=SamplingParams(**sampling),
        proposer=Proposer(proposer),
        cache_salt=cache_salt,
    )


def _reply(deltas: Sequence[TokenDelta]) -> Reply:
    stats = deltas[-1].stats
    if deltas[-1].error is not None:
        raise SystemExit(deltas[-1].error)
    assert stats is not None
    return Reply(
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        rounds=stats.speculation,
        by_proposer=stats.speculation_by_proposer,
        num_verifies=sum(stats.num_draft_tokens_histogram),
    )
