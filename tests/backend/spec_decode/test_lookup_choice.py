"""The sequences whose tokens are verified, and how many: what is likely to be kept, against what the rows cost."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from kimi_backend.spec_decode.adaptive_policy import AdaptivePolicy
from kimi_backend.spec_decode.controller import SpeculationController
from kimi_backend.spec_decode.lookup import LookupMemory, SequenceLookup
from kimi_backend.spec_decode.lookup_choice import Candidate, LookupChooser
from kimi_backend.spec_decode.lookup_index import Match
from kimi_backend.spec_decode.policy import FixedPolicy, SpeculationPolicy
from kimi_backend.spec_decode.round_times import Round
from kimi_backend.spec_decode.row_choice import Batch
from kimi_backend.spec_decode.step_times import StepShape
from support.made_up_costs import linear_costs
from support.waiting import PATIENCE_S

TEXT = np.arange(20, dtype=np.int32)
LONG, SHORT = Match(40, 5), Match(4, 5)
ALONE = Batch(1, 3, 100, is_drafting=True, overlaps_next=False)


def a_candidate(match: Match, num_proposed: int = 3, most: int = 7) -> Candidate:
    lookup = SequenceLookup.of(TEXT, 4, LookupMemory(1 << 20))
    assert lookup is not None
    return Candidate(lookup, match, SpeculationController(7), num_proposed, most)


def taught(match: Match, num_kept: int, rounds: int = 40) -> LookupChooser:
    """A chooser that has seen matches of about this length keep so many tokens of seven."""
    chooser = LookupChooser()
    for _ in range(rounds):
        chooser.pools.of(match).record(7, num_kept)
    return chooser


@pytest.mark.parametrize(("num_kept", "expected"), [(7, 7), (0, 0)])
def test_matches_that_were_right_replace_the_draft(num_kept: int, expected: int) -> None:
    assert taught(LONG, num_kept).choose([a_candidate(LONG)], FixedPolicy(), ALONE) == [expected]


def test_matches_are_judged_by_their_length() -> None:
    chooser = taught(LONG, 7)
    for _ in range(40):
        chooser.pools.of(SHORT).record(7, 0)
    both = [a_candidate(SHORT), a_candidate(LONG)]
    assert chooser.choose(both, FixedPolicy(), replace(ALONE, num_sequences=2, num_proposed=6)) == [0, 7]


def test_a_text_whose_short_matches_are_like_others_has_long_ones_like_others() -> None:
    """One token of short matches is kept, all of long ones: what a text kept of one says nothing of the other."""
    chooser = taught(LONG, 7)
    for _ in range(40):
        chooser.pools.of(SHORT).record(7, 1)
    short, other = a_candidate(SHORT), a_candidate(LONG)
    for _ in range(20):
        chooser.choose([short], FixedPolicy(), ALONE)
        short.lookup.acceptance.record(7, 1)
    expected = chooser._found([other])
    assert chooser._found([short._replace(match=LONG)]) == pytest.approx(expected, rel=0.05)


def test_a_match_is_noted_as_worth_its_rows_by_what_would_be_checked_without_a_draft() -> None:
    policy = AdaptivePolicy(linear_costs(3000, 900), linear_costs(300, 10, 10))
    for num_kept, is_checked in ((7, True), (0, False)):
        chooser, candidate = taught(LONG, num_kept), a_candidate(LONG, num_proposed=0)
        chooser.choose([candidate], policy, replace(ALONE, num_proposed=0))
        assert chooser.pools.are_checked(LONG) is is_checked
        assert bool(candidate.speculation.looked_up.next[0]) is is_checked


def test_a_bad_match_is_better_than_no_draft() -> None:
    undrafted = replace(ALONE, num_proposed=0)
    assert taught(SHORT, 0).choose([a_candidate(SHORT, num_proposed=0)], FixedPolicy(), undrafted) == [7]


def test_no_more_than_a_request_may_have() -> None:
    assert taught(LONG, 7).choose([a_candidate(LONG, num_proposed=0, most=2)], FixedPolicy(), ALONE) == [2]


@pytest.mark.parametrize(
    ("row_us", "num_kept", "least", "most"),
    [(1, 7, 7, 7), (900, 2, 1, 3), (5000, 0, 0, 0)],
    ids=["cheap rows", "dear rows", "dear rows that are never kept"],
)
def test_rows_are_taken_by_what_they_cost(row_us: float, num_kept: int, least: int, most: int) -> None:
    """There is no draft, so that only the target's steps have costs."""
    policy: SpeculationPolicy = AdaptivePolicy(linear_costs(3000, row_us), None)
    chosen = taught(LONG, num_kept).choose([a_candidate(LONG, num_proposed=0)], policy, replace(ALONE, num_proposed=0))
    assert least <= chosen[0] <= most


@pytest.mark.parametrize(("overlaps_next", "num_kept"), [(True, 0), (False, 1)])
def test_a_row_that_costs_the_overlap_must_be_worth_it(overlaps_next: bool, num_kept: int) -> None:
    """3 ms of the target, 1 of the host, rows for nothing. A third of a token more gains while both take turns, and
    makes a round of 3 ms one of 4 while the host's time is hidden."""
    policy = AdaptivePolicy(linear_costs(3000, 0), None)
    shape = StepShape(1, 1, 1, 64)
    for _ in range(200):
        policy.end_round(
            Round(
                target=shape,
                draft=None,
                total_s=0.004,
                target_s=0.003,
                draft_s=0.0,
                draft_wait_s=0.0,
                is_overlapped=False,
            )
        )
    batch = replace(ALONE, num_proposed=0, is_drafting=False, overlaps_next=overlaps_next)
    for chance, expected in ((0.3, num_kept), (0.4, 1)):
        likely = np.array([[chance, 0.0]])
        assert policy.choose_looked_up(likely, batch).tolist() == [expected]


def test_a_collector_that_runs_while_memory_is_counted_waits_for_nobody() -> None:
    """It may come to an index anywhere, so also in the thread that holds the lock."""
    memory = LookupMemory(1 << 20)
    assert memory.take(500)

    def collect() -> None:
        with memory._lock:
            memory.give_back(500)

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert memory.num_bytes == 0


def test_matches_of_32_tokens_and_more_are_counted_together() -> None:
    pools = LookupChooser().pools
    counted = [pools.of(Match(length, 5)) for length in (1, 2, 3, 4, 8, 16, 31, 32, 5000)]
    assert len(set(map(id, counted))) == 6
    assert counted[1] is counted[2] and counted[5] is counted[6] and counted[7] is counted[8]
