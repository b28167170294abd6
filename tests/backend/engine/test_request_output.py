"""One request's deltas from step outputs made by hand; letters are tokens."""

import numpy as np
import pytest

from kimi_backend.engine.commit import LogprobRows, StepOutput
from kimi_backend.engine.request_output import RequestOutput
from kimi_backend.scheduler.sequence import Finish
from kimi_backend.text.text_stream import TextStream
from kimi_backend.types.request import EndCause, FinishReason, RoundTime, TokenDelta
from support.letter_tokenizer import LetterTokenizer
from support.sequences import make_sequence

TOKENIZER = LetterTokenizer(26)


class Stream:
    """A `RequestOutput` that is fed letters."""

    def __init__(self, **sampling: object) -> None:
        self.sequence = make_sequence(k=3, **sampling)  # type: ignore[arg-type]
        params = self.sequence.params
        text = TextStream(
            TOKENIZER,
            params.stop,
            include_stop=params.include_stop_in_output,
            with_offsets=self.sequence.request.return_token_origins,
        )
        self.output = RequestOutput(self.sequence, text, lambda delta: None)

    def push(
        self,
        letters: str,
        drafted: int = 3,
        accepted: int = 0,
        finish: Finish | None = None,
        time_s: float = 5.0,
        logprobs: LogprobRows | None = None,
    ) -> TokenDelta | None:
        ids = TOKENIZER.encode(letters)
        step = StepOutput(self.sequence, time_s, ids, drafted, accepted, logprobs=logprobs, finish=finish)
        return self.output.push(step)


def letters(delta: TokenDelta | None) -> tuple[str, str]:
    assert delta is not None
    return TOKENIZER.decode(delta.token_ids), delta.text


STOP_TOKEN = Finish(FinishReason.STOP, matched_stop=25)


def test_text_and_tokens_of_a_step() -> None:
    stream = Stream()
    assert letters(stream.push("ABC", accepted=2)) == ("ABC", "ABC")
    final = stream.push("DE", accepted=1, finish=Finish(FinishReason.LENGTH))
    assert letters(final) == ("DE", "DE")
    assert final is not None
    assert (final.finish_reason, final.matched_stop) == (FinishReason.LENGTH, None)
    assert final.stats is not None
    assert final.stats.num_output_tokens == 5
    assert final.stats.total_time_s == 5.0
    assert final.stats.speculation is not None
    assert final.stats.speculation.num_accepted_draft_tokens == 3


def origins(delta: TokenDelta | None) -> tuple[list[int], list[int]]:
    assert delta is not None
    assert len(delta.token_origins) == len(delta.token_offsets) == len(delta.token_ids)
    return [int(origin) for origin in delta.token_origins], list(delta.token_offsets)


def test_each_token_says_who_said_it_first_and_where_its_text_begins() -> None:
    stream = Stream(return_token_origins=True)
    assert origins(stream.push("A", drafted=0)) == ([0], [0])
    assert origins(stream.push("BCD", accepted=2)) == ([1, 1, 0], [1, 2, 3])
    assert origins(stream.push("E", accepted=0)) == ([0], [4])
    # The draft guessed right up to the stop token, which has no text; nothing came of the rest of its guesses.
    assert origins(stream.push("FZ", accepted=3, finish=STOP_TOKEN)) == ([1, 1], [5, 6])


def test_origins_end_with_a_stop_string_and_do_not_wait_for_one() -> None:
    stream = Stream(return_token_origins=True, stop=("CDX", "EF"))
    first, second = stream.push("ABCD", accepted=3), stream.push("EFGH", accepted=3)
    assert (letters(first), origins(first)) == (("ABCD", "AB"), ([1, 1, 1, 0], [0, 1, 2, 3]))
    assert (letters(second), origins(second)) == (("EF", "CD"), ([1, 1], [4, 5]))


def test_origins_come_only_where_they_were_asked_for() -> None:
    delta = Stream().push("ABC", accepted=2)
    assert delta is not None
    assert delta.token_origins == delta.token_offsets == ()


def test_a_stop_token_counts_and_is_not_shown() -> None:
    final = Stream().push("ABZ", finish=STOP_TOKEN)
    assert letters(final) == ("ABZ", "AB")
    assert final is not None
    assert final.matched_stop == 25


def test_a_stop_string_before_a_stop_token_of_the_same_step_wins() -> None:
    """The log-probabilities of the tokens behind it are left out like the tokens."""
    rows = LogprobRows(-np.arange(5.0), np.arange(10).reshape(5, 2), -np.arange(10.0).reshape(5, 2))
    final = Stream(stop=("BC",), logprobs=1).push("ABCDZ", finish=STOP_TOKEN, logprobs=rows)
    assert letters(final) == ("ABC", "A")
    assert final is not None
    assert [(row.token_id, row.logprob, row.top) for row in final.logprobs] == [
        (0, 0.0, ((0, 0.0),)),
        (1, -1.0, ((2, -2.0),)),
        (2, -2.0, ((4, -4.0),)),
    ]
    assert final.matched_stop == "BC"
    assert final.stats is not None
    assert final.stats.num_output_tokens == 3


def test_a_stop_string_across_steps_is_held_back_and_cut() -> None:
    stream = Stream(stop=("CDE",))
    assert letters(stream.push("ABC")) == ("ABC", "AB")
    assert letters(stream.push("D")) == ("D", "")
    final = stream.push("EFG", accepted=2)
    assert letters(final) == ("E", "")
    assert final is not None
    assert (final.finish_reason, final.matched_stop) == (FinishReason.STOP, "CDE")


def test_text_that_was_held_back_comes_with_the_end() -> None:
    stream = Stream(stop=("CDE",))
    stream.push("ABCD")
    assert letters(stream.push("", finish=Finish(FinishReason.CANCELLED))) == ("", "CD")


def test_nothing_counts_after_the_end() -> None:
    stream = Stream(stop=("B",))
    final = stream.push("AB", accepted=1)
    assert stream.push("CDEF", accepted=3) is None
    assert stream.push("G", finish=Finish(FinishReason.LENGTH)) is None
    assert final is not None
    assert final.stats is not None
    assert final.stats.speculation is not None
    assert stream.output.num_output_tokens == final.stats.num_output_tokens == 2
    assert stream.output.speculation.all.snapshot() == final.stats.speculation


def test_a_request_that_never_started_has_waited_all_its_time() -> None:
    final = Stream().push("", drafted=0, finish=Finish(FinishReason.CANCELLED, error="no"))
    assert final is not None
    assert final.stats is not None
    assert (final.stats.queue_time_s, final.stats.first_token_time_s) == (5.0, None)
    assert final.stats.speculation is None
    assert final.error == "no"


@pytest.mark.parametrize("num_rounds", [1, 5, 40])
@pytest.mark.parametrize("most", [0, 1, 4, 5])
def test_times_of_rounds_are_bounded_and_evenly_spread(most: int, num_rounds: int) -> None:
    stream = Stream(return_round_times=most)
    stream.push("A", drafted=0, time_s=2.0)
    for i in range(num_rounds - 1):
        stream.push("BC", drafted=3, accepted=1, time_s=3.0 + i)
    final = stream.push("D", drafted=2, accepted=0, finish=STOP_TOKEN, time_s=2.0 + num_rounds)
    assert final is not None
    assert final.stats is not None
    times = final.stats.round_times
    assert min(most, num_rounds) // 2 < len(times) <= most if most else times == ()
    numbers = [entry.round for entry in times]
    assert numbers == [i * (numbers[1] if len(numbers) > 1 else 1) for i in range(len(numbers))]
    for entry in times:
        drafted = (2, 0) if entry.round == num_rounds - 1 else (3, 1)
        assert entry == RoundTime(entry.round, 2.0 + entry.round, 3.0 + entry.round, *drafted)


def test_nothing_is_said_behind_a_failure() -> None:
    stream = Stream()
    stream.push("AB", accepted=1)
    final = stream.output.fail("no such token", 7.0)
    assert (final.finish_reason, final.error, final.cause) == (
        FinishReason.ERROR,
        "no such token",
        EndCause.TEXT_FAILED,
    )
    assert final.stats is not None and final.stats.total_time_s == 7.0
    assert stream.push("C") is None
