"""The choice of k knows what sequences look up: beside the draft, and instead of it."""

import itertools

import numpy as np
import pytest

from kimi_backend.spec_decode.looked_up import KIND_MEMORY, Expected, LookedUp
from kimi_backend.spec_decode.round_times import RoundTimes
from kimi_backend.spec_decode.row_choice import choose_rows
from support.made_up_costs import linear_costs


def seen(*runs: tuple[int, int], memory: float | None = None) -> LookedUp:
    """Runs of (verifies, tokens of a match in each), half of which were kept; each brings one token of its own."""
    one = LookedUp() if memory is None else LookedUp(memory)
    for count, num_checked in runs:
        for _ in range(count):
            num_tokens = 1 + num_checked // 2
            one.end_verify(num_tokens, num_tokens if num_checked else 0, num_checked)
    return one


def test_a_verify_counts_once() -> None:
    """One whose match was not checked as one that was expected to keep so many, the other by what it kept."""
    for num_checked, kept in ((0, 2.5), (6, 3)):
        one = LookedUp()
        one.next = 4, 2.5
        one.end_verify(4, 4, num_checked)
        one.end_verify(1, 0, 0)
        fading = 1 - 1 / 64
        assert one.sums == pytest.approx([fading * part for part in (4, 1, num_checked or 4, kept)])
        assert one.weight == pytest.approx(fading * 4 + 1)


def test_several_sequences_look_up_apart() -> None:
    """One has a match in all rounds, one in half of them, one in none."""
    halves = [(1, 4), (1, 0)] * 400
    expected = Expected.of([seen((400, 6)), seen(*halves), seen((400, 0))])
    assert expected.num_tokens == pytest.approx([6, 4, 0])
    assert expected.num_kept == pytest.approx([3, 2, 0])
    found = np.array([64, 0.75 * 64, 0]) / [4, 3, 1]
    others = 16 + np.array([0, 0.25 * 64, 64])  # those of its kind, of which nothing is known, too
    assert expected.shares == pytest.approx(found / (found + others), rel=0.04)


def test_who_drafts_changes_nothing_of_what_would_be_looked_up() -> None:
    """Six tokens of nine are found in one verify; the others come in three, or in one that the draft was right in."""
    alone, beside = LookedUp(), LookedUp()
    for _ in range(300):
        for _ in range(3):
            alone.end_verify(1, 0, 0)
        alone.end_verify(6, 6, 7)
        beside.end_verify(3, 0, 0)
        beside.end_verify(6, 6, 7)
    shares = [Expected.of([one]).shares[0] for one in (alone, beside)]
    assert shares[0] == pytest.approx(shares[1], rel=0.06)


def test_nothing_is_expected_where_nothing_was_looked_up() -> None:
    assert Expected.of([seen((9, 0)), LookedUp()]) is None


def test_matches_come_in_runs() -> None:
    """The last two dozens of verifies or so say most of a sequence."""
    for num_without, least, most in ((8, 0.3, 0.5), (128, 0.0, 0.07)):
        expected = Expected.of([seen((100, 4), (num_without, 0))])
        assert least < expected.shares[0] < most, num_without


def test_what_matches_gave_is_known_when_there_have_been_none_for_long() -> None:
    expected = Expected.of([seen((100, 4), (640, 0))])
    assert expected.shares == pytest.approx([0], abs=1e-4)
    assert (expected.num_tokens, expected.num_kept) == (pytest.approx([4]), pytest.approx([2]))


def test_a_sequence_is_expected_to_be_like_its_kind_until_it_is_known() -> None:
    kind = seen((1000, 4), memory=KIND_MEMORY)
    for num_verifies, least, most in ((0, 0.99, 1.0), (8, 0.35, 0.45), (32, 0.1, 0.2)):
        one = LookedUp()
        one.kind = kind
        for _ in range(num_verifies):
            one.end_verify(1, 0, 0)
        assert least < Expected.of([one]).shares[0] <= most, num_verifies
    assert kind.sums[0] / kind.weight < 1, "told of each"


def test_a_kind_changes_slowly() -> None:
    for num_without, least, most in ((40, 0.8, 0.9), (800, 0.1, 0.25), (4000, 0.0, 0.05)):
        kind = seen((2000, 4), (num_without, 0), memory=KIND_MEMORY)
        one = LookedUp()
        one.kind = kind
        assert least < Expected.of([one]).shares[0] < most, num_without


def test_a_draft_makes_rounds_without_a_match_fewer() -> None:
    """Alone six verifies of ten find nothing. With 1.25 tokens of a draft kept in each there are 6 / 2.25 of them."""
    kept, rows, shares = Expected(np.array([0.4]), np.array([7.0]), np.array([3.0])).beside(np.array([[0.75, 0.5]]))
    without = 6 / (1 + np.array([0, 0.75, 1.25]))
    assert shares == pytest.approx(4 / (4 + without[1]))
    assert kept[0] == pytest.approx((4 * 3 + without * [0, 0.75, 1.25]) / (4 + without))
    assert rows[0] == pytest.approx((4 * 7 + without * [0, 1, 2]) / (4 + without))


@pytest.mark.parametrize("row_us", [1, 60, 400])
def test_no_other_choice_is_faster_beside_matches(row_us: int) -> None:
    """A sequence's draft tokens change its rounds and no other's."""
    rng = np.random.default_rng(row_us)
    times = RoundTimes(linear_costs(1000, row_us), linear_costs(200, row_us / 10, 20))
    for _ in range(6):
        chances = rng.uniform(0.1, 0.95, (3, 3)).cumprod(axis=1)
        expected = Expected(rng.uniform(0, 0.9, 3), rng.uniform(2, 7, 3), rng.uniform(0, 4, 3))

        def rate_of(counts: tuple[int, ...], chances: np.ndarray = chances, expected: Expected = expected) -> float:
            kept = rows = 0.0
            resting, num_seqs = 1.0, len(counts)
            for count, chance, share, checked, found in zip(counts, chances, *expected, strict=True):
                drafted = float(chance[:count].sum())
                of_match, other = share, (1 - share) / (1 + drafted)
                kept += (of_match * found + other * drafted) / (of_match + other)
                rows += (of_match * checked + other * count) / (of_match + other)
                resting *= share / (share + (1 - share) / (1 + chance[0])) if count else 1.0
            if not max(counts):
                return (num_seqs + kept) / times.plain(num_seqs, 0, rows, 1 - float(np.prod(1 - expected.shares)))
            num_drafting = np.array([sum(count > 0 for count in counts)])
            parts = np.array([rows]), np.array([kept]), 0, np.array([resting])
            return float((num_seqs + kept) / times.drafting(num_seqs, num_drafting, max(counts), *parts)[0])

        choice = choose_rows(chances, 3, 0, times, looked_up=expected)
        chosen = tuple(choice.num_draft_tokens.tolist())
        assert choice.tokens_per_s == pytest.approx(rate_of(chosen))
        assert choice.plain_tokens_per_s == pytest.approx(rate_of((0, 0, 0)))
        # Tokens are taken in the order of their chance, which is the best one but for what matches change in it.
        best = max(map(rate_of, itertools.product(range(4), repeat=3)))
        assert choice.tokens_per_s >= 0.97 * best


def test_a_draft_must_be_better_than_what_is_looked_up_without_it() -> None:
    """Rows for nothing, a draft of four tenths of the target, whose first token is kept in three of four rounds: it
    pays where nothing is looked up. With a match in nine of ten rounds most of its tokens are not needed."""
    times = RoundTimes(linear_costs(1000, 0), linear_costs(400, 0, 50))
    chances = np.array([[0.75, 0.55, 0.4]])
    assert choose_rows(chances, 1, 64, times).num_draft_tokens[0] == 2
    often = Expected(np.array([0.9]), np.array([7.0]), np.array([5.0 / 0.9]))
    found = choose_rows(chances, 1, 64, times, looked_up=often)
    assert found.num_draft_tokens[0] == 0
    assert found.plain_tokens_per_s == pytest.approx(6000, rel=0.01)
    seldom = Expected(np.array([0.1]), np.array([2.0]), np.array([1.0]))
    assert choose_rows(chances, 1, 64, times, looked_up=seldom).num_draft_tokens[0] > 0


def test_a_sequence_that_finds_a_match_needs_no_draft_tokens_in_that_round() -> None:
    """Though nothing of its matches is kept: they are checked in place of what the draft proposed."""
    times = RoundTimes(linear_costs(1000, 0), linear_costs(400, 0, 50))
    mostly = Expected(np.array([0.9]), np.array([0.0]), np.array([0.0]))
    assert choose_rows(np.array([[0.75, 0.55, 0.4]]), 1, 64, times, looked_up=mostly).num_draft_tokens[0] == 0


def test_single_row_steps_rest_while_a_match_is_followed() -> None:
    """A draft of 0.5 ms takes 0.25 in the rounds with a match."""
    times = RoundTimes(linear_costs(1000, 0), linear_costs(200, 0, 50))
    half = Expected(np.array([0.5]), np.array([0.0]), np.array([0.0]))
    found = choose_rows(np.array([[0.95, 0.9, 0.85]]), 1, 64, times, looked_up=half)
    assert found.num_draft_tokens[0] == 2
    without, share = 1 / (1 + 1.85), 1 / (1 + 1 / 1.95)
    assert found.tokens_per_s == pytest.approx((1 + without * 1.85 / (1 + without)) / (0.0015 - 0.00025 * share))
