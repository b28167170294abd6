"""Runs a batch of equal requests through the in-process engine and returns its rounds."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kimi_backend.config.settings import ServingSettings
from kimi_backend.engine.engine import Engine
from kimi_backend.serving.spec_ensemble_server import scheduler_settings
from kimi_backend.types.request import GenerateRequest, SamplingParams, TokenDelta
from slice_suite.recording import RecordedDraft, RecordedTarget, Recording, Round
from slice_suite.scripted_matches import MatchScript, follow_script

READY_TIMEOUT_S = 60.0
FIRST_PROMPT_TOKEN = 1000


def run_batch(
    target: Any,
    draft: Any | None,
    settings: ServingSettings,
    *,
    batch_size: int,
    prompt_len: int,
    num_output_tokens: int,
    num_speculative_tokens: int,
    seed: int = 0,
    keeps_plans: bool = False,
    async_scheduling: bool = False,
    vocab_size: int | None = None,
    temperature: float = 0.0,
    num_masked: int = 0,
    masked_by: str = "grammar",
    matches: MatchScript | None = None,
    num_rounds: int = 0,
    seconds: float = 0.0,
    at_end: Callable[[Engine], None] = lambda engine: None,
) -> list[Round]:
    """Requests of random prompts, all submitted at once, none of which ends early.

    Prompts take all rows of a step even beside sequences that decode: their time is what is measured.

    vocab_size: prompts are of the tokens below; the target's unless given.
    num_masked: how many of them may not draw every token.
    masked_by: "grammar", or "allowed_token_ids", which older code knows too.
    matches: what is found in each sequence's own text, and proposed instead of what the draft does.
    num_rounds: after so many in which all decode, the rest of their tokens is not waited for; 0 for all.
    seconds: the same by the time that such rounds take; 0 for all.
    at_end: called before the engine is stopped.
    async_scheduling: the setting of that name; plans that are kept can be run again only where it is off.

    Raises:
        RuntimeError: a request ended by an error.
    """
    recording = Recording(keeps_plans=keeps_plans)
    all_tokens = target.describe().vocab_size
    masks, options = _masks(all_tokens, masked_by) if num_masked else ({}, {})
    engine = Engine(
        RecordedTarget(target, recording),
        None if draft is None else RecordedDraft(draft, recording),
        settings=replace(
            scheduler_settings(settings),
            max_prompt_tokens_beside_decode=0,
            enable_prefix_cache=False,
            async_scheduling=async_scheduling,
        ),
        **options,
    )
    if matches is not None:
        make = engine._make_sequence
        engine._make_sequence = lambda *args: follow_script(make(*args), matches)  # type: ignore[method-assign]
    engine.start()
    problems: list[str] = []
    done = threading.Semaphore(0)
    recording.on_round = _Countdown(num_rounds, seconds, batch_size, done)

    def sink(delta: TokenDelta) -> None:
        if delta.finish_reason is not None:
            if delta.error:
                problems.append(delta.error)
            done.release()

    try:
        engine.wait_until_ready(READY_TIMEOUT_S)
        rng = np.random.default_rng(seed)
        vocab_size = vocab_size or all_tokens
        requests = []
        for index in range(batch_size):
            prompt = rng.integers(min(FIRST_PROMPT_TOKEN, vocab_size // 2), vocab_size, prompt_len)
            request = GenerateRequest(
                request_id=str(index),
                prompt_token_ids=tuple(prompt.tolist()),
                sampling=SamplingParams(
                    max_tokens=num_output_tokens,
                    temperature=temperature,
                    seed=seed * 1000 + index,
                    **({"ignore_eos": True} | (masks if index < num_masked else {})),
                ),
                num_speculative_tokens=num_speculative_tokens,
            )
            requests.append(request)
        # The engine's thread takes none before all are there, so that steps have the same shapes in every run.
        with engine._loop.changed:
            for request in requests:
                engine.submit(request, sink)
        for _ in range(batch_size):
            done.acquire()
        failed = list(problems)  # of those that are stopped none counts
        at_end(engine)
    finally:
        engine.stop()
    if failed:
        raise RuntimeError(f"{len(failed)} of {batch_size} requests failed: {failed[0]}")
    return recording.rounds


class _Countdown:
    """Counts rounds in which a whole batch decodes; after the last one nobody is waited for."""

    def __init__(self, num_rounds: int, seconds: float, batch_size: int, done: threading.Semaphore) -> None:
        self._num_left, self._seconds, self._batch_size, self._done = num_rounds, seconds, batch_size, done
        self._first_s = 0.0

    def __call__(self, last: Round) -> None:
        if not last.is_decode or last.num_seqs < self._batch_size:
            return
        self._num_left -= 1
        self._first_s = self._first_s or last.target_end_s
        is_late = 0 < self._seconds <= last.target_end_s - self._first_s
        if is_late or not self._num_left:
            self._seconds, self._num_left = 0.0, 0
            self._done.release(self._batch_size)


def _masks(vocab_size: int, masked_by: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sampling parameters of a masked request, and what its engine needs."""
    if masked_by == "allowed_token_ids":
        return {"allowed_token_ids": tuple(range(vocab_size - 1))}, {}
    from slice_suite.grammars import GRAMMAR, compiler

    options = {"grammars": _Kept(compiler(vocab_size)), "eos_token_ids": (vocab_size - 1,)}
    return {"grammar": GRAMMAR, "ignore_eos": False}, options


class _Kept:
    """A compiler that outlives its engines."""

    def __init__(self, compiler: Any) -> None:
        self.request = compiler.request

    def close(self) -> None:
        pass
