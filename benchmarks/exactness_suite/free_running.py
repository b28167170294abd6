"""Whole texts by the engine, in process: for each k and temperature, all prompts together."""

import functools
import threading
from collections.abc import Sequence
from dataclasses import replace

import torch

from kimi_backend.config.settings import ServingSettings
from kimi_backend.engine.engine import Engine
from kimi_backend.runners.load.loading import load_pair
from kimi_backend.serving.spec_ensemble_server import scheduler_settings
from kimi_backend.spec_decode.protocols import Draft, Target
from kimi_backend.types.request import GenerateRequest, SamplingParams, TokenDelta

READY_S = 120.0
Text = tuple[int, ...]


class _Collector:
    """One request's tokens."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.error: str | None = None
        self.done = threading.Event()

    def __call__(self, delta: TokenDelta) -> None:
        self.token_ids += delta.token_ids
        if delta.finish_reason is not None:
            self.error = delta.error
            self.done.set()


def texts(
    target: Target,
    draft: Draft | None,
    settings: ServingSettings,
    prompts: Sequence[Text],
    k: int,
    temperature: float,
    num_tokens: int,
    seeds: Sequence[int],
) -> tuple[list[Text], float | None]:
    """Every prompt's text, and the acceptance length (1 + mean accepted a round)."""
    engine = Engine(target, draft, settings=scheduler_settings(settings))
    engine.start()
    try:
        engine.wait_until_ready(READY_S)
        sampling = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True)
        collectors = [_Collector() for _ in prompts]
        for index, (prompt, collector) in enumerate(zip(prompts, collectors, strict=True)):
            request = GenerateRequest(
                request_id=str(index),
                prompt_token_ids=prompt,
                sampling=replace(sampling, seed=seeds[index]),
                num_speculative_tokens=k,
            )
            engine.submit(request, collector)
        for collector in collectors:
            collector.done.wait()
            if collector.error is not None:
                raise RuntimeError(collector.error)
        speculation = engine.statistics().totals.speculation
        length = speculation.mean_acceptance_length if speculation else None
        return [tuple(collector.token_ids) for collector in collectors], length
    finally:
        engine.stop()


def run_alone(
    settings: ServingSettings,
    prompts: Sequence[Text],
    seeds: Sequence[int],
    k: int,
    temperature: float,
    num_tokens: int,
) -> list[Text]:
    """Run in a process of its own, which loads both models once. Products of float32 numbers are ieee products."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(1)
    target, draft = _pair(settings)
    return texts(target, draft, settings, prompts, k, temperature, num_tokens, seeds)[0]


@functools.cache
def _pair(settings: ServingSettings) -> tuple[Target, Draft | None]:
    """Loaded once a process, which makes the texts of several cases."""
    return load_pair(settings)


def num_identical(expected: Sequence[Text], found: Sequence[Text]) -> int:
    return sum(a == b for a, b in zip(expected, found, strict=True))


def first_difference(expected: Text, found: Text) -> int | None:
    """Index of the first token that differs; None if none does."""
    return next((i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b), None)
