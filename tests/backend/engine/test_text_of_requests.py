"""The texts that a client of the engine reads: stop strings and tokens, log-probabilities."""

import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from kimi_backend.engine import emitter
from kimi_backend.engine.engine import Engine
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.text.text_stream import TextStream, TextUpdate
from kimi_backend.types.request import EndCause, FinishReason
from support.letter_tokenizer import LetterTokenizer
from support.threaded_engine import (
    SCRIPT,
    VOCAB,
    Client,
    make_draft,
    make_target,
    ready,
    request,
    started_engines,
)
from support.waiting import PATIENCE_S, wait_for


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    with started_engines() as make:
        yield make


def test_a_stop_string_ends_the_text_and_counts_nothing_behind_it(start: Callable[..., Engine]) -> None:
    engine = ready(start(make_target(), make_draft(1.0), tokenizer=LetterTokenizer(VOCAB)))
    plain = Client()
    engine.submit(request(max_tokens=60), plain)
    plain.wait()
    stop = plain.text[20:23]
    cut = plain.text.index(stop)
    client = Client()
    engine.submit(request(max_tokens=60, stop=(stop,)), client)
    final = client.wait()
    assert client.text == plain.text[:cut]
    assert client.token_ids == plain.token_ids[: cut + 3]
    assert (final.finish_reason, final.matched_stop) == (FinishReason.STOP, stop)
    assert final.stats is not None
    assert final.stats.num_output_tokens == cut + 3
    assert final.stats.speculation is not None
    rounds, accepted = final.stats.speculation.num_spec_steps, final.stats.speculation.num_accepted_draft_tokens
    truncated = 1 + rounds + accepted - final.stats.num_output_tokens
    assert 0 <= truncated <= 3
    wait_for(lambda: engine.statistics().num_running == 0)
    assert engine.statistics().totals.num_output_tokens == len(plain.token_ids) + cut + 3


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_stop_string_costs_at_most_one_step_however_slow_the_text_is(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, async_scheduling: bool
) -> None:
    """And one more where the step behind is in flight."""
    target = make_target()
    settings = SchedulerSettings(async_scheduling=async_scheduling)
    engine = ready(start(target, tokenizer=LetterTokenizer(VOCAB), settings=settings))
    plain = Client()
    engine.submit(request(max_tokens=60), plain)
    plain.wait()
    push = TextStream.push

    def slow(self: TextStream, token_ids: Sequence[int]) -> TextUpdate:
        time.sleep(0.01)
        return push(self, token_ids)

    monkeypatch.setattr(TextStream, "push", slow)
    monkeypatch.setattr(emitter, "LONGEST_LAG_WAIT_S", PATIENCE_S)
    num_steps_before = target.num_steps
    stop = plain.text[18:21]
    client = Client()
    engine.submit(request(prompt=(1, 2, 3), max_tokens=60, stop=(stop,)), client)
    client.wait()
    wait_for(lambda: engine.statistics().num_running == 0)
    num_needed = plain.text.index(stop) + 3
    assert num_needed <= target.num_steps - num_steps_before <= num_needed + 1 + async_scheduling


def test_stop_strings_can_be_kept_and_wait_for_min_tokens(start: Callable[..., Engine]) -> None:
    engine = ready(start(make_target(), make_draft(), tokenizer=LetterTokenizer(VOCAB)))
    plain = Client()
    engine.submit(request(max_tokens=60), plain)
    plain.wait()
    letter = plain.text[2]
    later = next(i for i in range(10, 60) if plain.text[i] == letter)
    client = Client()
    engine.submit(request(max_tokens=60, stop=(letter,), include_stop_in_output=True, min_tokens=later), client)
    client.wait()
    assert client.text == plain.text[: later + 1]


def test_a_stop_token_is_counted_but_not_shown(start: Callable[..., Engine]) -> None:
    engine = ready(start(make_target(), make_draft(), tokenizer=LetterTokenizer(VOCAB)))
    plain = Client()
    engine.submit(request(max_tokens=60), plain)
    plain.wait()
    stop_id = plain.token_ids[9]
    end = plain.token_ids.index(stop_id) + 1
    for include in (False, True):
        client = Client()
        engine.submit(request(max_tokens=60, stop_token_ids=(stop_id,), include_stop_in_output=include), client)
        final = client.wait()
        assert client.token_ids == plain.token_ids[:end]
        assert client.text == plain.text[: end if include else end - 1]
        assert (final.finish_reason, final.matched_stop) == (FinishReason.STOP, stop_id)


def test_logprobs_belong_to_the_emitted_tokens(start: Callable[..., Engine]) -> None:
    engine = ready(start(make_target(), make_draft()))
    client, plain = Client(), Client()
    engine.submit(request(logprobs=3, temperature=1.3), client)
    engine.submit(request(temperature=1.3), plain)
    client.wait()
    plain.wait()
    entries = [entry for delta in client.deltas for entry in delta.logprobs]
    assert [entry.token_id for entry in entries] == client.token_ids == plain.token_ids
    assert not any(delta.logprobs for delta in plain.deltas)
    prefix = [1, 2, 3]
    for entry in entries:
        raw = raw_logprobs(prefix)
        assert entry.logprob == pytest.approx(raw[entry.token_id], abs=1e-5)
        best = sorted(range(VOCAB), key=lambda token: (-raw[token], token))[:3]
        assert [token for token, _ in entry.top] == best
        prefix.append(entry.token_id)


def raw_logprobs(prefix: list[int]) -> list[float]:
    import numpy as np

    from support.scripted_logits import prefix_hash

    logits = SCRIPT.logits(np.array([prefix_hash(prefix)], np.uint64))[0].astype(np.float64)
    return (logits - np.log(np.exp(logits).sum())).tolist()  # type: ignore[no-any-return]


def test_a_text_that_cannot_be_made_fails_its_request_alone(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    push = TextStream.push

    def breaks(self: TextStream, token_ids: Sequence[int]) -> TextUpdate:
        if self.num_chars > 3 and self is broken[0]:
            raise ValueError("no such token")
        broken.append(self)
        return push(self, token_ids)

    broken: list[TextStream] = []
    monkeypatch.setattr(TextStream, "push", breaks)
    engine = ready(start(make_target(), make_draft(), tokenizer=LetterTokenizer(VOCAB)))
    client, other = Client(), Client()
    engine.submit(request(max_tokens=100), client)
    final = client.wait()
    engine.submit(request(max_tokens=10), other)
    assert (final.finish_reason, final.cause) == (FinishReason.ERROR, EndCause.TEXT_FAILED)
    assert final.error == "the output could not be turned into text: no such token"
    assert final.stats is not None and 3 < final.stats.num_output_tokens < 20
    assert other.wait().finish_reason is FinishReason.LENGTH
    wait_for(lambda: engine.statistics().num_running == 0)
    totals = engine.statistics().totals
    assert (totals.num_finished[FinishReason.ERROR], totals.num_ended_by) == (1, {EndCause.TEXT_FAILED: 1})
