"""Rounds of the same requests as `server_overhead.py` serves, with both runners in this process: what is left of a
round when no server is between engine and runners."""

import threading
from typing import Any

from kimi_backend.config.settings import ServingSettings
from kimi_backend.engine.engine import Engine
from kimi_backend.serving.spec_ensemble_server import scheduler_settings
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_backend.types.request import GenerateRequest, SamplingParams, TokenDelta

READY_S = 60.0


def rounds_in_process(
    settings: ServingSettings, counts: list[int], fields: dict[str, Any], prompt: str
) -> dict[int, float]:
    """Milliseconds a round, by the number of requests at once.

    Args:
        fields: of `SamplingParams` and `num_speculative_tokens`.
    """
    from kimi_backend.runners.load.loading import load_pair

    tokenizer = load_tokenizer(settings.tokenizer or settings.checkpoint)
    prompt_ids = tuple(tokenizer.encode(prompt))
    fields = dict(fields)
    k = fields.pop("num_speculative_tokens")
    target, draft = load_pair(settings)
    engine = Engine(
        target, draft, settings=scheduler_settings(settings), eos_token_ids=tokenizer.eos_token_ids, tokenizer=tokenizer
    )
    engine.start()
    try:
        engine.wait_until_ready(READY_S)
        return {count: _measure(engine, count, prompt_ids, k, fields) for count in counts}
    finally:
        engine.stop()


def _measure(engine: Engine, count: int, prompt_ids: tuple[int, ...], k: int, fields: dict[str, Any]) -> float:
    _run(engine, count, prompt_ids, k, fields)
    before = engine.statistics()
    _run(engine, count, prompt_ids, k, fields)
    after = engine.statistics()
    seconds = sum(after.step_seconds.values()) - sum(before.step_seconds.values())
    return 1e3 * seconds / (after.num_steps - before.num_steps)


def _run(engine: Engine, count: int, prompt_ids: tuple[int, ...], k: int, fields: dict[str, Any]) -> None:
    done = threading.Semaphore(0)

    def sink(delta: TokenDelta) -> None:
        if delta.finish_reason is not None:
            done.release()

    for seed in range(count):
        sampling = SamplingParams(seed=seed, **fields)
        engine.submit(
            GenerateRequest(
                request_id=f"{seed}", prompt_token_ids=prompt_ids, sampling=sampling, num_speculative_tokens=k
            ),
            sink,
        )
    for _ in range(count):
        done.acquire()
