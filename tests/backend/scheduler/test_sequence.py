from types import SimpleNamespace

import pytest

from kimi_backend.types.request import EndCause, FinishReason
from support.sequences import make_sequence


def test_tokens_behind_a_stop_token_are_dropped() -> None:
    sequence = make_sequence(eos_token_ids=frozenset({9}), stop_token_ids=(8,))
    assert sequence.append([4, 5]) == 2
    assert sequence.finish is None
    assert sequence.append([6, 8, 9]) == 2
    assert sequence.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 8]
    assert sequence.finish is not None
    assert (sequence.finish.reason, sequence.finish.matched_stop) == (FinishReason.STOP, 8)


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_ignore_eos_ignores_the_end_of_sequence_only(ignore_eos: bool) -> None:
    sequence = make_sequence(eos_token_ids=frozenset({9}), ignore_eos=ignore_eos, stop_token_ids=(8,))
    assert sequence.append([9, 4, 8]) == (3 if ignore_eos else 1)


def test_the_longest_length_ends_it() -> None:
    sequence = make_sequence(max_num_tokens=5)
    sequence.append([4])
    assert (sequence.num_remaining_tokens, sequence.most_draft_tokens) == (1, 0)
    sequence.append([5])
    assert (sequence.num_remaining_tokens, sequence.most_draft_tokens) == (0, 0)
    assert sequence.finish is not None
    assert sequence.finish.reason is FinishReason.LENGTH


def test_a_stop_token_at_the_longest_length_is_a_stop() -> None:
    sequence = make_sequence(max_num_tokens=5, eos_token_ids=frozenset({9}))
    sequence.append([4, 9])
    assert sequence.finish is not None
    assert sequence.finish.reason is FinishReason.STOP


def test_more_tokens_than_planned_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="more than planned for"):
        make_sequence(max_num_tokens=5).append([4, 5, 6])


def test_the_buffer_grows() -> None:
    sequence = make_sequence(max_num_tokens=5000)
    for token in range(2000):
        sequence.append([token, token + 1])
    assert sequence.num_tokens == 4003
    assert sequence.token_ids[-1] == 2000
    assert sequence.last_token_id == 2000


def test_a_mask_has_the_bits_of_its_tokens() -> None:
    mask = make_sequence(allowed_token_ids=(0, 31, 32, 63)).allowed_mask(3)
    assert mask.tolist() == [1 - 2**31, 1 - 2**31, 0]


def test_penalties_count_the_output_and_know_the_prompt() -> None:
    sequence = make_sequence((5, 5, 7), presence_penalty=0.5, max_num_tokens=500)
    sequence.append([7, 8, 7])
    sequence.append(list(range(100, 300)))
    counts = sequence.penalties
    assert counts is not None
    found = {
        token: (count, in_prompt)
        for token, count, in_prompt in zip(
            counts.token_ids.tolist(), counts.counts.tolist(), counts.in_prompt.tolist(), strict=True
        )
    }
    assert found == {5: (0, True), 7: (2, True), 8: (1, False)} | dict.fromkeys(range(100, 300), (1, False))
    assert make_sequence().penalties is None


class MadeUpGrammar:
    def __init__(self, follows: bool, is_too_slow: bool) -> None:
        self.follows, self.is_too_slow = follows, is_too_slow

    def advance(self, token_ids: list[int]) -> bool:
        return self.follows


@pytest.mark.parametrize(
    ("follows", "is_too_slow", "error", "cause"),
    [
        (True, False, None, None),
        (True, True, "guided_regex: takes too long to match, at output token 2", EndCause.BAD_GRAMMAR),
        (False, True, "output token 2 does not follow the grammar", EndCause.ENGINE_FAILED),
    ],
)
def test_a_grammar_that_is_left_or_takes_too_long_ends_its_request(
    follows: bool, is_too_slow: bool, error: str | None, cause: EndCause | None
) -> None:
    for stop_token_ids in ((), (5,)):
        sequence = make_sequence(grammar=SimpleNamespace(field="guided_regex"), stop_token_ids=stop_token_ids)
        sequence.grammar = MadeUpGrammar(follows, is_too_slow)  # type: ignore[assignment]
        sequence.append([4, 5])
        finish = sequence.finish
        if stop_token_ids and follows:
            assert finish is not None and finish.reason is FinishReason.STOP
        elif error is None:
            assert finish is None
        else:
            assert finish is not None and (finish.reason, finish.error, finish.cause) == (
                FinishReason.ERROR,
                error,
                cause,
            )
