import math

import pytest

from kimi_backend.spec_decode.acceptance import AcceptancePool, gains
from kimi_backend.spec_decode.round_costs import CostRatios
from kimi_backend.spec_decode.weighing import Weighing

GOOD, BAD = gains([0.9, 0.8, 0.7], 1.0, 3), gains([0.05, 0.05, 0.05], 1.0, 3)
TIMES = [1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4]


def independent(doubt: float) -> list[list[float]]:
    """The covariance of numbers that were each measured alone."""
    return [[doubt**2 if i == j else 0.0 for j in range(8)] for i in range(8)]


def costs(doubt: float = 0.01) -> CostRatios:
    return CostRatios([math.log(time) for time in TIMES], [0.0] + [doubt] * 7, independent(doubt))


def pool_of(num_rounds: int, rate: float) -> AcceptancePool:
    pool = AcceptancePool()
    for index in range(num_rounds):
        pool.record(3, 3 * (index % 100 < 100 * rate))
    return pool


def test_the_best_is_chosen_among_those_that_draft() -> None:
    weighing = Weighing(costs(), [GOOD, BAD], 2)
    both = weighing.best([True, True], everyone=True)
    assert both.members == (True, True)
    assert both.num_draft_tokens > 0
    alone = weighing.best([True, True], everyone=False)
    assert alone.members == (True, False)
    assert alone.tokens_per_s > both.tokens_per_s
    hopeless = Weighing(costs(), [BAD], 1).best([True], everyone=False)
    assert hopeless.members == (True,), "whether a kind drafts at all is judged elsewhere"
    assert weighing.best([False, False], everyone=True).num_draft_tokens == 0


@pytest.mark.parametrize("num_rounds", [20, 300])
def test_gains_are_those_of_the_rounds_and_surer_with_more_of_them(num_rounds: int) -> None:
    weighing, pool = Weighing(costs(), [GOOD], 1), pool_of(num_rounds, 0.7)
    choice = weighing.best([True], everyone=True)
    found = weighing.log_gains(choice, [True], pool)
    expected = gains(pool.rates(), 1.0, 3)
    assert [gain for gain, _ in found] == pytest.approx([math.log((1 + expected[k]) / TIMES[k]) for k in (1, 2, 3)])
    assert found == Weighing(costs(), [BAD], 1).log_gains(choice, [True], pool), "one sequence's luck is not its kind's"
    assert (found[2][1] < 0.03) == (num_rounds > 100)
    doubtful = Weighing(costs(0.3), [GOOD], 1).log_gains(choice, [True], pool_of(num_rounds, 0.7))
    assert all(doubt > 0.3 for _, doubt in doubtful)


def test_the_most_hopeful_other_number_is_visited() -> None:
    weighing = Weighing(costs(0.01), [GOOD], 1)
    best = weighing.best([True], everyone=True).num_draft_tokens
    assert weighing.most_hopeful((True,), best) is None
    found = Weighing(costs(0.2), [GOOD], 1).most_hopeful((True,), best)
    assert found is not None
    assert found[0] != best
    assert 0 <= found[1] < 0.3
