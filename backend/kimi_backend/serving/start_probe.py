"""A check after the start that the target accepts what this draft proposes. A wrong one fails nothing, it is only slow.

Serving goes on meanwhile: the prompts are requests like any others, with the least priority, and are counted like them.
"""

import logging
import threading
from typing import Protocol

from kimi_backend.engine.request_output import DeltaSink
from kimi_backend.errors import KimiError
from kimi_backend.spec_decode.acceptance_watch import AcceptanceWatch
from kimi_backend.text.sample_prompts import SAMPLE_PROMPTS
from kimi_backend.text.tokenizer import Tokenizer
from kimi_backend.types.proposer import Proposer
from kimi_backend.types.request import GenerateRequest, SamplingParams, SpeculationStats, TokenDelta

logger = logging.getLogger("kimi_backend.serving")

NUM_PROMPTS = 4
NUM_TOKENS = 24
LEAST_PRIORITY = -1_000_000
START_WITHIN_S = 600.0
WITHIN_S = 120.0


class TakesRequests(Protocol):
    """The part of an engine that the probe needs."""

    def wait_until_ready(self, timeout_s: float) -> None: ...

    def submit(self, request: GenerateRequest, sink: DeltaSink) -> object: ...


def score_draft(engine: TakesRequests, tokenizer: Tokenizer, within_s: float = WITHIN_S) -> SpeculationStats:
    """Let the target go on with a few short prompts greedily; what was drafted and accepted at the first position.

    Rounds of requests that fail, or do not end in time, are left out.
    """
    done = threading.Semaphore(0)
    found: list[SpeculationStats] = []

    def sink(delta: TokenDelta) -> None:
        if delta.finish_reason is not None:
            if delta.stats is not None and delta.stats.speculation is not None:
                found.append(delta.stats.speculation)
            done.release()

    prompts = SAMPLE_PROMPTS[:NUM_PROMPTS]
    for index, prompt in enumerate(prompts):
        request = GenerateRequest(
            request_id=f"start-probe-{index}",
            prompt_token_ids=tuple(tokenizer.encode(prompt)),
            sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_TOKENS, ignore_eos=True),
            proposer=Proposer.EAGLE3,
            priority=LEAST_PRIORITY,
            timeout_s=within_s,
            cache_salt="start probe",
        )
        engine.submit(request, sink)
    for _ in prompts:
        done.acquire(timeout=within_s)
    return SpeculationStats(
        num_spec_steps=sum(stats.num_spec_steps for stats in found),
        drafted_per_position=(sum(stats.drafted_per_position[0] for stats in found),),
        accepted_per_position=(sum(stats.accepted_per_position[0] for stats in found),),
    )


def warn_of_wrong_draft(engine: TakesRequests, tokenizer: Tokenizer, command: str) -> None:
    """Wait for the engine, score its draft, and say what to run if it does not fit.

    Args:
        command: finds the settings that the draft was trained with.
    """
    watch = AcceptanceWatch()
    try:
        engine.wait_until_ready(START_WITHIN_S)
        watch.update(score_draft(engine, tokenizer))
    except KimiError as error:
        logger.info("the draft was not scored at the start: %s", error)
        return
    if watch.problem is not None:
        logger.warning("probe_at_start: %s. Find the right settings: %s", watch.problem, command)
