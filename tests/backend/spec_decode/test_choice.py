import itertools
import random

import pytest

from kimi_backend.spec_decode.acceptance import gains
from kimi_backend.spec_decode.choice import best_choice, rate, round_s

TIMES = [1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4]


def test_nobody_drafts_where_it_does_not_pay() -> None:
    best = best_choice(TIMES, [gains([0.1] * 7, 1.0, 3)], 1)
    assert (best.num_draft_tokens, best.members) == (0, (False,))
    assert best.tokens_per_s == 1.0


def test_a_limit_is_kept() -> None:
    assert best_choice(TIMES, [gains([0.95] * 7, 1.0, 2)], 1).num_draft_tokens == 2
    assert best_choice(TIMES, [[0.0]], 3).num_draft_tokens == 0


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    num_candidates, num_sequences = rng.randint(1, 5), 6
    chances = [gains([rng.random()] * 7, 1.0, rng.randint(0, 4)) for _ in range(num_candidates)]
    times = [1.0]
    for _ in range(7):
        times.append(times[-1] + rng.uniform(0.01, 0.4))
    every = (
        rate(times, chances, members, k, num_sequences)
        for k in range(5)
        for members in itertools.product((False, True), repeat=num_candidates)
    )
    best = best_choice(times, chances, num_sequences)
    assert best.tokens_per_s == pytest.approx(max(every))
    assert rate(times, chances, best.members, best.num_draft_tokens, num_sequences) == pytest.approx(best.tokens_per_s)


def test_one_that_drafts_costs_less_than_all_and_more_than_none() -> None:
    assert TIMES[0] < round_s(TIMES, 3, 1, 8) < round_s(TIMES, 3, 8, 8) == TIMES[3]
    assert round_s(TIMES, 3, 0, 8) == TIMES[0]
