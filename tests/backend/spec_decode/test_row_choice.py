"""The choice from a table is the best there is, by trying everything; a round takes what the table says."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from kimi_backend.errors import InvalidRequestError
from kimi_backend.spec_decode.round_times import RoundTimes
from kimi_backend.spec_decode.row_choice import choose_rows
from kimi_backend.spec_decode.step_times import StepShape, StepTimes
from kimi_backend.types.step_costs import StepCosts
from support.made_up_costs import QUERY_LENS, SIZES, linear_costs


def rate_of(counts: tuple[int, ...], chances: np.ndarray, num_seqs: int, times: RoundTimes) -> float:
    """Tokens a second of one choice."""
    depth, num_rows = max(counts), sum(counts)
    if not depth:
        return num_seqs / times.plain(num_seqs, 0)
    kept = sum(float(row[:count].sum()) for row, count in zip(chances, counts, strict=True))
    num_drafting = np.array([sum(count > 0 for count in counts)])
    rows, gained = np.array([float(num_rows)]), np.array([kept])
    return float((num_seqs + kept) / times.drafting(num_seqs, num_drafting, depth, rows, gained, 0)[0])


@pytest.mark.parametrize("row_us", [1, 60, 400, 2000])
@pytest.mark.parametrize("num_seqs", [3, 5])
def test_no_other_choice_is_faster(row_us: int, num_seqs: int) -> None:
    rng = np.random.default_rng(row_us + num_seqs)
    times = RoundTimes(linear_costs(1000, row_us), linear_costs(200, row_us / 10, 20))
    for _ in range(10):
        chances = rng.uniform(0.1, 0.95, (3, 3)).cumprod(axis=1)
        chances[2, 2] = 0  # nobody may have it
        choice = choose_rows(chances, num_seqs, 0, times)
        counts = itertools.product(range(4), range(4), range(3))
        best = max(rate_of(tried, chances, num_seqs, times) for tried in counts)
        assert choice.tokens_per_s == pytest.approx(best)
        chosen = tuple(choice.num_draft_tokens.tolist())
        assert rate_of(chosen, chances, num_seqs, times) == pytest.approx(best)
        assert choice.plain_tokens_per_s == pytest.approx(rate_of((0, 0, 0), chances, num_seqs, times))


@pytest.mark.parametrize("row_us", [1, 400, 2000])
def test_finding_out_costs_no_other_choice_less_a_verified_token(row_us: int) -> None:
    rng = np.random.default_rng(row_us)
    times = RoundTimes(linear_costs(1000, row_us), linear_costs(800, row_us / 10, 200))

    def lost(counts: tuple[int, ...], chances: np.ndarray) -> float:
        """Tokens that a round without a draft would have given in the same time, beyond this one's."""
        kept = sum(float(row[:count].sum()) for row, count in zip(chances, counts, strict=True))
        reached = sum(count > 0 for count in counts)
        reached += sum(float(row[: count - 1].sum()) for row, count in zip(chances, counts, strict=True) if count)
        seconds = (3 + kept) / rate_of(counts, chances, 3, times)
        return float((seconds * rate_of((0, 0, 0), chances, 3, times) - 3 - kept) / reached)

    for _ in range(10):
        chances = rng.uniform(0.1, 0.8, (3, 3)).cumprod(axis=1)
        chosen = tuple(choose_rows(chances, 3, 0, times, finds_out=True).num_draft_tokens.tolist())
        # Tokens are taken by their chance, so what is compared are such choices.
        places = sorted(itertools.product(range(3), range(3)), key=lambda place: -chances[place])
        by_chance = set()
        for depth, number in itertools.product(range(1, 4), range(1, 10)):
            taken = [row for row, position in places if position < depth][:number]
            by_chance.add(tuple(taken.count(row) for row in range(3)))
        assert chosen in by_chance
        assert lost(chosen, chances) == pytest.approx(min(lost(counts, chances) for counts in by_chance))


def test_nothing_is_drafted_where_rows_are_dear_and_all_where_they_are_free() -> None:
    chances = np.full((4, 7), 0.5).cumprod(axis=1)
    free = RoundTimes(linear_costs(1000, 0), linear_costs(1, 0, 0.01))
    assert choose_rows(chances, 4, 0, free).num_draft_tokens.tolist() == [7] * 4
    dear = RoundTimes(linear_costs(1000, 1000), linear_costs(1000, 1000, 100))
    assert choose_rows(chances, 4, 0, dear).num_draft_tokens.tolist() == [0] * 4
    assert choose_rows(np.zeros((1, 7)), 1, 0, free).num_draft_tokens.tolist() == [0]


def test_fewer_tokens_are_drafted_over_a_long_context_whose_keys_each_row_reads() -> None:
    costs = replace(linear_costs(1000, 100), context_us=(1.0,) * 4, row_context_us=(1.0,) * 4)
    times = RoundTimes(costs, linear_costs(100, 10, 10))
    likely = np.full((1, 7), 0.7).cumprod(axis=1)
    short, long = (int(choose_rows(likely, 1, context, times).num_draft_tokens[0]) for context in (64, 1024))
    assert 0 < long < short


def test_a_sequence_that_is_guessed_better_has_more() -> None:
    times = RoundTimes(linear_costs(1000, 100), linear_costs(100, 10, 10))
    chances = np.stack([np.full(7, rate).cumprod() for rate in (0.3, 0.6, 0.9)])
    first, second, third = choose_rows(chances, 3, 0, times).num_draft_tokens.tolist()
    assert first < second < third


def test_a_captured_step_takes_what_its_shape_and_its_live_rows_cost() -> None:
    plain = linear_costs(1000, 100, is_captured=True)
    padded = tuple(
        tuple(value + 50 * (len_ - 1) for value, len_ in zip(row, QUERY_LENS, strict=True))
        for row in (tuple(1000 + 100 * (size - 1 + length) for length in QUERY_LENS) for size in SIZES)
    )
    costs = StepCosts.from_json(
        StepCosts(**{name: getattr(plain, name) for name in StepCosts.__slots__} | {"padded_us": padded}).to_json()
    )
    times = StepTimes(costs)

    def us(num_seqs: int, num_rows: int, longest: int, context: float = 0) -> float:
        return 1e6 * float(sum(part[0] for part in times.parts(num_seqs, num_rows, longest, context)))

    assert us(16, 16, 1) == pytest.approx(2600)
    assert us(16, 64, 4) == pytest.approx(7400)
    assert us(10, 10, 1) == pytest.approx(2000)
    assert us(16, 19, 4) == pytest.approx(1000 + 1900 + 150), "one of them has four rows"
    assert us(16, 40, 4) == pytest.approx(1000 + 4000 + 150 * 24 / 45)
    assert us(128, 128, 1) == pytest.approx(2 * us(64, 64, 1)), "more than were measured"


def test_costs_cross_a_border_whole_or_not_at_all() -> None:
    costs = linear_costs(10, 1, 3)
    assert StepCosts.from_json(costs.to_json()) == costs
    for text in ("[]", "{}", "null", costs.to_json().replace("[1, 4, 16, 64]", "[1, 4]"), costs.to_json()[:-9]):
        with pytest.raises(InvalidRequestError):
            StepCosts.from_json(text)


def test_a_shape_is_its_plans() -> None:
    assert StepShape(2, 5, 4, 100).num_proposals == 0
