"""Sequences as the engine makes them from requests."""

from kimi_backend.scheduler.sequence import Sequence
from kimi_backend.types.request import GenerateRequest, SamplingParams


def make_sequence(
    prompt: tuple[int, ...] = (1, 2, 3),
    *,
    uid: int = 0,
    k: int = 3,
    max_num_tokens: int = 64,
    eos_token_ids: frozenset[int] = frozenset(),
    priority: int = 0,
    seed: int = 0,
    return_token_origins: bool = False,
    return_round_times: int = 0,
    **sampling: object,
) -> Sequence:
    """A waiting sequence; `sampling` are fields of SamplingParams."""
    request = GenerateRequest(
        request_id=f"r{uid}",
        prompt_token_ids=prompt,
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        priority=priority,
        return_token_origins=return_token_origins,
        return_round_times=return_round_times,
    )
    return Sequence(
        request,
        uid=uid,
        seed=seed,
        arrival_s=float(uid),
        num_speculative_tokens=k,
        max_num_tokens=max_num_tokens,
        eos_token_ids=eos_token_ids,
    )
