import pytest

from kimi_backend.spec_decode.visits import (
    DENSE_GAP,
    EXPLORATION_SHARE,
    FIRST_ALLOWANCE,
    FIRST_CHECK,
    FIRST_REAL,
    FIRST_REAL_AHEAD,
    LONGEST_CHECK,
    NUM_DENSE,
    PATIENCE,
    REAL_GROWTH,
    SPARSE_GAP,
    VISIT_ROUNDS,
    Visit,
    Visits,
)


def gaps(book: Visits, is_open: bool, count: int) -> list[int]:
    """Rounds between visits to no draft."""
    found = []
    for _ in range(count):
        rounds = 0
        while not book.wants_check(is_open):
            book.pass_round()
            rounds += 1
        found.append(rounds)
        assert book.begin_check(is_open).num_draft_tokens == 0
    return found


def test_no_draft_is_visited_often_while_it_is_open_whether_drafting_pays() -> None:
    assert gaps(Visits(), True, NUM_DENSE + 2) == [DENSE_GAP] * NUM_DENSE + [SPARSE_GAP] * 2


def test_and_seldom_once_it_is_known() -> None:
    assert gaps(Visits(), False, 5) == [FIRST_CHECK, 4 * FIRST_CHECK, 16 * FIRST_CHECK, LONGEST_CHECK, LONGEST_CHECK]


def test_other_visits_lose_a_bounded_share() -> None:
    book, num_visits = Visits(), 0
    for _ in range(20_000):
        book.pass_round()
        num_visits += book.begin_visit(1, 0.5) is not None
    lost = num_visits * 0.5 * (VISIT_ROUNDS + 1)
    assert 0.9 * EXPLORATION_SHARE * 20_000 < lost <= FIRST_ALLOWANCE + EXPLORATION_SHARE * 20_000


def test_a_visit_ends_when_it_has_seen_enough_or_waited_too_long() -> None:
    visit = Visit(2)
    visit.num_left -= VISIT_ROUNDS
    assert visit.is_over
    assert not Visit(2, patience=1).is_over
    assert Visit(2, patience=PATIENCE - PATIENCE).is_over


@pytest.mark.parametrize(("is_ahead", "first"), [(False, FIRST_REAL), (True, FIRST_REAL_AHEAD)])
def test_the_draft_is_left_for_a_visit_at_growing_distances(is_ahead: bool, first: int) -> None:
    book, found = Visits(), []
    for index in range(first * REAL_GROWTH**2 + 1):
        if book.wants_real_check(is_ahead):
            found.append(index)
            assert book.begin_real_check().leaves_draft
        book.pass_round()
    assert found == [first, first * REAL_GROWTH, first * REAL_GROWTH**2]
