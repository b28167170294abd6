"""The choice of k knows what sequences look up: beside the draft, and instead of it."""

import numpy as np
import pytest

from kimi_backend.spec_decode.looked_up import KIND_MEMORY, Expected, LookedUp
from kimi_backend.spec_decode.round_times import RoundTimes
from kimi_backend.spec_decode.row_choice import choose_rows
from support.made_up_costs import linear_costs


def seen(*runs: tuple[int, int], memory: float | None = None) -> LookedUp:
    """Runs of (verifies, tokens of a match in each), half of which were expected to be kept."""
    one = LookedUp() if memory is None else LookedUp(memory)
    for count, num_tokens in runs:
        for _ in range(count):
            one.next = num_tokens, num_tokens / 2
            one.end_verify()
    return one


def test_a_verify_counts_once() -> None:
    one = LookedUp()
    one.next = 4, 3.0
    one.end_verify()
    one.end_verify()
    used, tokens, kept = one.sums
    assert (used, tokens, kept) == pytest.approx((1 - 1 / 32, 4 * (1 - 1 / 32), 3 * (1 - 1 / 32)))


def test_several_sequences_look_up_together() -> None:
    """One has a match in all rounds, one in half of them, one in none."""
    many = 400
    halves = [(1, 4), (1, 0)] * many
    expected = Expected.of([seen((many, 6)), seen(*halves), seen((many, 0))])
    assert expected.shares == pytest.approx([1 - 8 / 40, 0.5 - 0.5 * 8 / 40, 0], abs=0.02)
    assert expected.num_tokens == pytest.approx(0.8 * (6 + 2), abs=0.1)
    assert expected.num_kept == pytest.approx(expected.num_tokens / 2)
    assert expected.share == pytest.approx(1 - 0.2 * 0.6, abs=0.02)


def test_nothing_is_expected_where_nothing_was_looked_up() -> None:
    assert Expected.of([seen((9, 0)), LookedUp()]) is None


def test_matches_come_in_runs() -> None:
    """The last ten or two dozens of verifies say most of a sequence."""
    for num_without, least, most in ((8, 0.5, 0.75), (64, 0.0, 0.2)):
        share = Expected.of([seen((100, 4), (num_without, 0))]).shares[0]
        assert least < share < most, share


def test_a_sequence_is_expected_to_be_like_its_kind_until_it_is_known() -> None:
    kind = seen((1000, 4), memory=KIND_MEMORY)
    for num_verifies, least, most in ((0, 0.99, 1.0), (8, 0.45, 0.6), (32, 0.2, 0.35)):
        one = LookedUp()
        one.kind = kind
        for _ in range(num_verifies):
            one.end_verify()
        assert least < Expected.of([one]).shares[0] <= most, num_verifies
    assert kind.sums[0] / kind.weight < 1, "told of each"


def test_a_kind_changes_slowly() -> None:
    for num_without, least, most in ((40, 0.85, 0.95), (400, 0.3, 0.45), (2000, 0.0, 0.05)):
        kind = seen((2000, 4), (num_without, 0), memory=KIND_MEMORY)
        one = LookedUp()
        one.kind = kind
        assert least < Expected.of([one]).shares[0] < most, num_without


def test_a_draft_must_be_better_than_what_is_looked_up_without_it() -> None:
    """Rows for nothing, a draft of four tenths of the target, whose first token is kept in three of four rounds: it
    pays where nothing is looked up. With a match in nine of ten rounds most of its tokens are not needed."""
    times = RoundTimes(linear_costs(1000, 0), linear_costs(400, 0, 50))
    chances = np.array([[0.75, 0.55, 0.4]])
    assert choose_rows(chances, 1, 64, times).num_draft_tokens[0] == 2
    often = Expected(np.array([0.9]), 6.3, 5.0)
    found = choose_rows(chances, 1, 64, times, looked_up=often)
    assert found.num_draft_tokens[0] == 0
    assert found.plain_tokens_per_s == pytest.approx(6000, rel=0.01)
    seldom = Expected(np.array([0.1]), 0.2, 0.1)
    assert choose_rows(chances, 1, 64, times, looked_up=seldom).num_draft_tokens[0] > 0


def test_a_sequence_that_finds_a_match_needs_no_draft_tokens_in_that_round() -> None:
    """Though nothing of its matches is kept: they are checked in place of what the draft proposed."""
    times = RoundTimes(linear_costs(1000, 0), linear_costs(400, 0, 50))
    chances = np.array([[0.75, 0.55, 0.4]])
    mostly = Expected(np.array([0.9]), 0.0, 0.0)
    assert choose_rows(chances, 1, 64, times, looked_up=mostly).num_draft_tokens[0] == 0


def test_single_row_steps_rest_while_a_match_is_followed() -> None:
    """A draft of 0.75 ms takes 0.25 in half of the rounds."""
    times = RoundTimes(linear_costs(1000, 0), linear_costs(200, 0, 50))
    found = choose_rows(np.array([[0.75, 0.55, 0.4]]), 1, 64, times, looked_up=Expected(np.array([0.5]), 0.0, 0.0))
    assert found.num_draft_tokens[0] == 3
    assert found.tokens_per_s == pytest.approx((1 + (0.75 + 0.55 + 0.4) / 2) / 0.0015)
