from kimi_backend.spec_decode.standing import (
    FIRST_PAUSE,
    LEAST_SURENESS,
    LONG_TRIAL,
    LONGEST_PAUSE,
    PAUSE_GROWTH,
    SURENESS,
    Standing,
)


def test_a_verdict_needs_sureness_either_way() -> None:
    standing = Standing()
    assert standing.judge([(-0.1, 0.1)], 1)
    assert not standing.is_sure
    assert standing.judge([(0.1, 0.1)], 1)
    assert not standing.is_sure
    assert standing.judge([(0.1, 0.04)], 1)
    assert standing.is_sure
    assert not standing.judge([(-0.1, 0.04)], 1)
    assert not standing.is_on
    assert not standing.is_sure


def test_what_stays_close_is_decided_in_the_end() -> None:
    standing = Standing()
    assert standing.sureness == SURENESS
    assert standing.judge([(-0.05, 0.05)], 1)
    standing.num_rounds = LONG_TRIAL
    assert standing.sureness == LEAST_SURENESS
    assert standing.judge([(0.05, 0.1)], 1)
    assert not standing.is_sure
    assert not standing.judge([(-0.05, 0.1)], 1), "the promise is not to be slower than without a draft"


def test_another_number_of_draft_tokens_may_be_the_hope() -> None:
    assert Standing().judge([(-0.05, 0.1), (-0.2, 0.01), (-0.3, 0.01)], 3)
    assert not Standing().judge([(-0.15, 0.1), (-0.2, 0.01), (-0.3, 0.01)], 3)


def test_a_clear_verdict_counts_twice() -> None:
    close, clear = Standing(), Standing()
    assert not close.judge([(-0.25, 0.1)], 1)
    assert not clear.judge([(-0.35, 0.1)], 1)
    assert (close.pause, clear.pause) == (FIRST_PAUSE, FIRST_PAUSE * PAUSE_GROWTH)


def test_trials_become_seldom_until_one_succeeds() -> None:
    standing, pauses = Standing(), []
    for _ in range(12):
        assert not standing.judge([(-0.25, 0.1)], 1)
        pauses.append(standing.pause)
        standing.begin_trial()
    assert pauses[:3] == [FIRST_PAUSE, FIRST_PAUSE * PAUSE_GROWTH, FIRST_PAUSE * PAUSE_GROWTH**2]
    assert pauses[-1] == LONGEST_PAUSE
    assert standing.judge([(1.0, 0.01)], 1)
    assert not standing.judge([(-0.25, 0.1)], 1)
    assert standing.pause == FIRST_PAUSE


def test_a_newcomer_may_begin_a_trial_before_those_that_run() -> None:
    standing = Standing()
    assert not standing.is_ready
    standing.judge([(-0.25, 0.1)], 1)
    assert not standing.is_ready
    standing.num_rounds = FIRST_PAUSE
    assert standing.is_ready
    assert not standing.is_overdue
    standing.num_rounds = 2 * FIRST_PAUSE
    assert standing.is_overdue
    standing.begin_trial()
    assert not standing.is_overdue
    assert not standing.is_ready
