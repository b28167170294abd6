"""A request waits until its grammar is compiled, and nobody else does; whatever ends it meanwhile, it ends once."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from kimi_backend.engine.engine import Engine
from kimi_backend.errors import CapacityError, InvalidRequestError
from kimi_backend.grammar.matcher import CompiledGrammar
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.grammar import Choice, Grammar
from kimi_backend.types.plan import Int32Array
from kimi_backend.types.request import EndCause, FinishReason
from support.threaded_engine import Client, make_draft, make_target, ready, request, started_engines

GRAMMAR = Grammar(Choice(("a",)), "response_format")


class OnlyToken:
    """A grammar of one token, again and again, or the end."""

    text_mask = np.full(1, -1, np.int32)

    def matcher(self) -> "OnlyToken":
        return self

    def fill(self, words: Int32Array) -> None:
        words[0] = 1 << 7

    def accept(self, token_id: int) -> bool:
        return token_id == 7

    def rollback(self, num_tokens: int) -> None:
        pass

    def forced(self, words: Int32Array) -> int | None:
        return None


class SlowSource:
    """Compiles when told."""

    def __init__(self) -> None:
        self.asked: list[Future[CompiledGrammar]] = []
        self.is_closed = False

    def request(self, grammar: Grammar, vocab_size: int) -> Future[CompiledGrammar]:
        assert (grammar, vocab_size) == (GRAMMAR, 32)
        self.asked.append(Future())
        return self.asked[-1]

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    with started_engines() as make:
        yield make


def started(start: Callable[..., Engine]) -> tuple[Engine, SlowSource]:
    source = SlowSource()
    engine = start(make_target(), make_draft(), grammars=source, eos_token_ids=(5,))
    return ready(engine), source


def test_nobody_else_waits(start: Callable[..., Engine]) -> None:
    engine, source = started(start)
    waiting, other = Client(), Client()
    engine.submit(request(grammar=GRAMMAR), waiting)
    engine.submit(request(request_id="other"), other)
    other.wait()
    assert not waiting.deltas
    source.asked[0].set_result(OnlyToken())
    waiting.wait()
    assert waiting.token_ids == [7] * 20


def test_one_that_is_compiled_already_begins_at_once(start: Callable[..., Engine]) -> None:
    engine, source = started(start)
    source.request = lambda grammar, vocab_size: done  # type: ignore[method-assign]
    done: Future[CompiledGrammar] = Future()
    done.set_result(OnlyToken())
    client = Client()
    engine.submit(request(grammar=GRAMMAR), client)
    client.wait()
    assert client.token_ids == [7] * 20


def test_what_is_no_grammar_ends_its_request(start: Callable[..., Engine]) -> None:
    engine, source = started(start)
    client = Client()
    engine.submit(request(grammar=GRAMMAR), client)
    source.asked[0].set_exception(InvalidRequestError("response_format: is none"))
    client.wait()
    last = client.deltas[-1]
    assert (last.finish_reason, last.cause) == (FinishReason.ERROR, EndCause.BAD_GRAMMAR)
    assert last.error == "response_format: is none"


@pytest.mark.parametrize("way", ["cancel", "deadline", "stop"])
def test_it_may_end_before(start: Callable[..., Engine], way: str) -> None:
    engine, source = started(start)
    client = Client()
    asked = replace(request(grammar=GRAMMAR), timeout_s=0.2 if way == "deadline" else None)
    handle = engine.submit(asked, client)
    if way == "cancel":
        handle.cancel()
    elif way == "stop":
        engine.stop()
        assert source.is_closed
    client.wait()
    assert client.deltas[-1].finish_reason is FinishReason.CANCELLED
    if way == "stop":
        source.asked[0].set_result(OnlyToken())
    else:
        assert source.asked[0].cancelled(), "nothing is compiled for nobody"
        assert engine.statistics().num_waiting == 0
    time.sleep(0.1)
    assert len(client.deltas) == 1


def test_a_compiler_that_fails_ends_its_request_alone(start: Callable[..., Engine]) -> None:
    engine, source = started(start)
    client, other = Client(), Client()
    engine.submit(request(grammar=GRAMMAR), client)
    source.asked[0].set_exception(OSError("no process"))
    client.wait()
    last = client.deltas[-1]
    assert (last.finish_reason, last.cause) == (FinishReason.ERROR, EndCause.ENGINE_FAILED)
    assert last.error == "its grammar could not be compiled: OSError: no process"
    engine.submit(request(request_id="other"), other)
    other.wait()
    assert other.deltas[-1].finish_reason is not FinishReason.ERROR


def test_a_request_that_finds_the_queue_full_leaves_nothing_to_compile(start: Callable[..., Engine]) -> None:
    source = SlowSource()
    settings = SchedulerSettings(max_queue_size=1)
    engine = ready(start(make_target(), make_draft(), settings=settings, grammars=source, eos_token_ids=(5,)))
    engine.submit(request(grammar=GRAMMAR), Client())
    with pytest.raises(CapacityError):
        engine.submit(request(request_id="other", grammar=GRAMMAR), Client())
    assert len(source.asked) == 1


def test_a_request_with_one_needs_what_compiles_and_an_end(start: Callable[..., Engine]) -> None:
    engine = ready(start(make_target(), eos_token_ids=(5,)))
    with pytest.raises(InvalidRequestError, match="response_format: not supported here: there is no compiler"):
        engine.submit(request(grammar=GRAMMAR), Client())
    engine = ready(start(make_target(), grammars=SlowSource()))
    with pytest.raises(InvalidRequestError, match=r"response_format: .* no end-of-sequence token"):
        engine.submit(request(grammar=GRAMMAR), Client())


def test_ignoring_the_end_is_refused(start: Callable[..., Engine]) -> None:
    engine, _ = started(start)
    with pytest.raises(InvalidRequestError, match="ignore_eos: true given, false is allowed beside response_format"):
        engine.submit(request(grammar=GRAMMAR, ignore_eos=True), Client())
