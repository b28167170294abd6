"""The choice from a table is the best there is, by trying everything; a round takes what the table says."""

import itertools
from dataclasses import replace
from typing import Any

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
        times.reach(num_seqs)
        return 1e6 * float(sum(times.fixed_and_variable(num_seqs, num_rows, longest, context)))

    assert us(16, 16, 1) == pytest.approx(2600)
    assert us(16, 64, 4) == pytest.approx(7400)
    assert us(10, 10, 1) == pytest.approx(2000)
    assert us(16, 19, 4) == pytest.approx(1000 + 1900 + 150), "one of them has four rows"
    assert us(16, 40, 4) == pytest.approx(1000 + 4000 + 150 * 24 / 45)
    assert us(128, 128, 1) == pytest.approx(2 * us(64, 64, 1)), "more than were measured"


def plain_step_us(costs: StepCosts, num_seqs: int, num_rows: float, longest: int, context_len: float) -> float:
    """A step by its table, one number after another."""
    lens, size = costs.query_lens, min(num_seqs, costs.num_seqs[-1])

    def of_size(values: tuple[float, ...]) -> float:
        return float(np.interp(size, costs.num_seqs, values))

    per_seq = num_rows / num_seqs
    us = float(np.interp(per_seq, lens, [of_size(column) for column in zip(*costs.step_us, strict=True)]))
    further = size * max(context_len - costs.context_len, 0)
    us += further * (of_size(costs.context_us) + of_size(costs.row_context_us) * (per_seq - 1))
    bucket = min(length for length in lens if length >= longest)
    padding = []
    for n, steps, padded in zip(costs.num_seqs, costs.step_us, costs.padded_us, strict=True):
        live = (n - 1 + bucket) / n
        more = max(padded[lens.index(bucket)] - float(np.interp(live, lens, steps)), 0.0)
        padding.append(more / (bucket - live) if live < bucket else 0.0)
    us += of_size(tuple(padding)) * (bucket - per_seq) * costs.is_captured
    return us * num_seqs / size


def random_costs(rng: np.random.Generator, *, is_captured: bool) -> StepCosts:
    def grid(columns: int) -> tuple[tuple[float, ...], ...]:
        return tuple(map(tuple, rng.uniform(500, 5000, (len(SIZES), columns)).tolist()))

    of_token, of_row = (tuple(rng.uniform(0, 0.3, len(SIZES)).tolist()) for _ in range(2))
    return StepCosts(
        num_seqs=SIZES,
        query_lens=QUERY_LENS,
        is_captured=is_captured,
        context_len=64,
        step_us=grid(len(QUERY_LENS)),
        padded_us=grid(len(QUERY_LENS)),
        context_us=of_token,
        row_context_us=of_row,
        proposals_us=grid(3),
    )


@pytest.mark.parametrize("is_captured", [False, True])
def test_many_shapes_at_once_take_what_each_takes_alone(is_captured: bool) -> None:
    rng = np.random.default_rng(int(is_captured))
    for _ in range(10):
        costs = random_costs(rng, is_captured=is_captured)
        times, context_len = StepTimes(costs), float(rng.choice([20, 64, 500]))
        times.reach(100)
        num_seqs, longest, depth = rng.integers(1, 101, 9), rng.integers(1, 9, (5, 1)), rng.integers(0, 8, (5, 1))
        num_rows = num_seqs * rng.uniform(1, longest, (5, 9))
        steps = sum(times.fixed_and_variable(num_seqs, num_rows, longest, context_len))
        drawn = times.proposals(num_seqs, depth, context_len) * np.ones((5, 9))
        for row, column in itertools.product(range(5), range(9)):
            n, d, size = int(num_seqs[column]), int(depth[row, 0]), min(int(num_seqs[column]), SIZES[-1])
            us = plain_step_us(costs, n, num_rows[row, column], int(longest[row, 0]), context_len)
            assert 1e6 * steps[row, column] == pytest.approx(us)
            of_token = float(np.interp(size, SIZES, costs.context_us)) * n * max(context_len - 64, 0)
            last = [of_size[min(d, 3) - 1] for of_size in costs.proposals_us]
            us = float(np.interp(size, SIZES, last)) * n / size + (d - 1) * of_token if d else 0.0
            assert 1e6 * drawn[row, column] == pytest.approx(us)
            alone = times.fixed_and_variable(n, float(num_rows[row, column]), int(longest[row, 0]), context_len)
            assert float(sum(alone)) == steps[row, column]


def test_costs_cross_a_border_whole_or_not_at_all() -> None:
    costs = linear_costs(10, 1, 3)
    assert StepCosts.from_json(costs.to_json()) == costs
    for text in ("[]", "{}", "null", costs.to_json().replace("[1, 4, 16, 64]", "[1, 4]"), costs.to_json()[:-9]):
        with pytest.raises(InvalidRequestError):
            StepCosts.from_json(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_seqs": SIZES[:-1]},
        {"query_lens": QUERY_LENS[:-1]},
        {"step_us": ((1.0,) * 4,) * 3},
        {"padded_us": ((1.0,) * 4,) * 3},
        {"padded_us": ((1.0,) * 3,) * 4},
        {"context_us": (0.0,) * 3},
        {"row_context_us": (0.0,) * 5},
        {"proposals_us": ((1.0,),) * 3},
        {"proposals_us": ((1.0,), (1.0,), (1.0,), (1.0, 2.0))},
        {"proposals_us": ((),) * 4},
        {"step_us": ((1.0, 1.0, 1.0, -1.0),) * 4},
        {"context_us": (0.0, 0.0, 0.0, -1.0)},
        {"row_context_us": (0.0, 0.0, -1.0, 0.0)},
        {"proposals_us": ((1.0,), (1.0,), (-1.0,), (1.0,))},
        {"query_lens": (1,), "step_us": ((1.0,),) * 4, "padded_us": ((1.0,),) * 4},
        dict.fromkeys(("num_seqs", "step_us", "padded_us", "context_us", "row_context_us", "proposals_us"), ()),
    ],
)
def test_costs_that_do_not_fit_together_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="do not fit together, or a time is below 0"):
        replace(linear_costs(10, 1, 3), **changes)


def test_the_least_costs_that_fit() -> None:
    two = {"query_lens": (1, 2), "step_us": ((0.0, 1.0),) * 4, "padded_us": ((0.0, 1.0),) * 4}
    assert replace(linear_costs(10, 1), **two).proposals_us == ()  # type: ignore[arg-type]


def test_a_shape_is_its_plans() -> None:
    assert StepShape(2, 5, 4, 100).num_proposals == 0
