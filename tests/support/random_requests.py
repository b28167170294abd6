"""Requests that use every feature of the sampling surface, often together."""

import random

import numpy as np

from kimi_backend.types.request import GenerateRequest, SamplingParams


def random_sampling(rng: random.Random, vocab_size: int, max_tokens: int) -> SamplingParams:
    """Each feature on or off; values that change which token wins."""

    def token() -> int:
        return rng.randrange(vocab_size)

    def maybe(value: float, off: float, share: float = 0.3) -> float:
        return value if rng.random() < share else off

    return SamplingParams(
        temperature=rng.choice((0.0, 0.3, 0.7, 1.0, 1.0, 1.3, 2.0)),
        top_k=int(maybe(rng.choice((1, 3, 10)), 0)),
        top_p=maybe(rng.choice((0.5, 0.9, 0.99)), 1.0),
        min_p=maybe(rng.choice((0.05, 0.3)), 0.0, 0.15),
        seed=rng.randrange(2**64),
        repetition_penalty=maybe(rng.choice((0.8, 1.3)), 1.0),
        frequency_penalty=maybe(rng.choice((-0.5, 0.7)), 0.0),
        presence_penalty=maybe(rng.choice((-0.5, 1.0)), 0.0),
        logit_bias={token(): rng.choice((-5.0, 3.0)) for _ in range(2)} if rng.random() < 0.15 else {},
        bad_words=((token(),), (token(), token())) if rng.random() < 0.15 else (),
        allowed_token_ids=tuple(range(vocab_size // 2)) if rng.random() < 0.1 else (),
        min_tokens=min(rng.randrange(8), max_tokens) if rng.random() < 0.2 else 0,
        max_tokens=max_tokens,
        stop_token_ids=(token(),) if rng.random() < 0.2 else (),
        ignore_eos=rng.random() < 0.2,
    )


def random_requests(
    rng: random.Random, count: int, vocab_size: int, *, longest_prompt: int = 24, longest_output: int = 32
) -> list[GenerateRequest]:
    """Prompts share beginnings, so that the prefix cache has something to find."""
    stems = [[rng.randrange(vocab_size) for _ in range(longest_prompt)] for _ in range(4)]
    requests = []
    for index in range(count):
        stem = rng.choice(stems)[: rng.randrange(longest_prompt)]
        tail = [rng.randrange(vocab_size) for _ in range(rng.randrange(1, longest_prompt - len(stem) + 1))]
        requests.append(
            GenerateRequest(
                request_id=f"r{index}",
                prompt_token_ids=tuple(stem + tail),
                sampling=random_sampling(rng, vocab_size, rng.randrange(1, longest_output + 1)),
                num_speculative_tokens=rng.randrange(8),
                priority=rng.choice((0, 0, 0, 1)),
                cache_salt=rng.choice((None, None, None, "a")),
            )
        )
    return requests


def requests_of_every_k(count: int, fewest_tokens: int) -> list[GenerateRequest]:
    """k of 0 to 7, some near their limit, some that stop; greedy and not. Token ids from 8 to 95."""
    generator = np.random.default_rng(11)
    return [
        GenerateRequest(
            request_id=str(index),
            prompt_token_ids=tuple(generator.integers(8, 96, int(generator.integers(3, 40))).tolist()),
            sampling=SamplingParams(
                max_tokens=int(generator.integers(fewest_tokens, 50)),
                temperature=float(index % 2),
                seed=index,
                ignore_eos=index < 5,
            ),
            num_speculative_tokens=(3, 7, 1, 0, 5, 3)[index % 6],
        )
        for index in range(count)
    ]
