"""The parts read out of a reply do not depend on how it was cut."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_client.replies.declared_tools import DeclaredTools
from kimi_client.replies.events import ArgumentsDelta, CallBegin, CallEnd, ContentDelta, ReasoningDelta
from kimi_client.replies.markers import MARKS
from kimi_client.replies.reader import ReplyReader
from support.reply_texts import CONTROLS, SB, TEXTS, TOOLS, A, B, E, ReplyText, arguments_of, call, one, place_controls

LONG = [
    one(f"arguments of {size}", SB + call(arguments=arguments_of(size)), arguments_of(size))
    for size in (64_000, 1_000_000)
]


def reader_of(case: ReplyText) -> ReplyReader:
    return ReplyReader(
        DeclaredTools(TOOLS, case.messages),
        begins_thinking=case.thinks,
        splits_thinking=case.splits,
        is_one_call_enough=case.is_one_enough,
    )


def read(reader, text, offsets, places):
    """The events of a text that comes cut at these places; each control token is told with the piece it begins in."""
    events, told = [], sorted(offsets)
    bounds = [*sorted({0, *places}), len(text)]
    for start, end in itertools.pairwise(bounds):
        now = [offset for offset in told if start <= offset < end]
        events += reader.feed(text[start:end], now)
    return merged(events + reader.feed("", is_last=True))


def merged(events):
    """Neighbouring deltas of one kind joined."""
    result = []
    for event in events:
        last = result[-1] if result else None
        if (
            type(event) is type(last)
            and hasattr(event, "text")
            and getattr(event, "index", 0) == getattr(last, "index", 0)
        ):
            fields = {"text": last.text + event.text}
            result[-1] = type(event)(event.index, **fields) if hasattr(event, "index") else type(event)(**fields)
        else:
            result.append(event)
    return result


def summed_up(events):
    """(reasoning, content, calls) of all events."""
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    calls = []
    for event in events:
        if isinstance(event, CallBegin):
            assert event.index == len(calls)
            calls.append([event.call_id, event.name, "", None])
        elif isinstance(event, ArgumentsDelta):
            calls[event.index][2] += event.text
        elif isinstance(event, CallEnd):
            assert calls[event.index][3] is None
            calls[event.index][3] = event.is_complete
    return reasoning, content, tuple(map(tuple, calls))


@pytest.mark.parametrize("case", [*TEXTS, *LONG], ids=lambda case: case.name)
def test_a_whole_text(case):
    text, offsets = case.place()
    assert summed_up(read(reader_of(case), text, offsets, [])) == case.expected


@pytest.mark.parametrize("size", [1, 3, 7, 13])
@pytest.mark.parametrize("case", TEXTS, ids=lambda case: case.name)
def test_pieces_of_one_size(case, size):
    text, offsets = case.place()
    expected = read(reader_of(case), text, offsets, [])
    assert read(reader_of(case), text, offsets, range(0, len(text), size)) == expected


@pytest.mark.parametrize("case", TEXTS, ids=lambda case: case.name)
def test_200_random_cuts(case):
    text, offsets = case.place()
    expected = read(reader_of(case), text, offsets, [])
    draw = random.Random(case.name)
    for _ in range(200):
        places = draw.sample(range(len(text)), k=min(len(text), draw.randrange(1, 12))) if text else []
        assert read(reader_of(case), text, offsets, places) == expected


def test_there_are_enough_texts():
    assert len({case.name for case in TEXTS}) == len(TEXTS) >= 60


PIECES = st.lists(
    st.sampled_from(["a", " ", "<", "«<think>»", f"«{SB}»", "functions.a:0", "a:0", "3", "{}", '{"x": "', '"}', call()])
    | st.sampled_from([*CONTROLS, "«<|tool_call_section_begin|>»", "«<|tool_call_section_end|>»", f"«{E}»"]),
    max_size=25,
).map("".join)


@given(PIECES, st.lists(st.integers(0, 400)), st.booleans(), st.booleans(), st.booleans())
def test_any_cuts_of_any_text_give_the_same_events(marked, cuts, thinks, splits, is_one_enough):
    case = ReplyText("", marked, thinks=thinks, splits=splits, is_one_enough=is_one_enough)
    text, offsets = case.place()
    places = [cut for cut in cuts if cut < len(text)]
    expected = read(reader_of(case), text, offsets, [])
    assert read(reader_of(case), text, offsets, places) == expected
    reasoning, content, calls = summed_up(expected)
    assert all(is_complete is not None for *_, is_complete in calls)
    assert all(is_complete for *_, is_complete in calls[:-1])
    assert len(calls) <= 1 or not is_one_enough
    if splits and "«" not in marked:
        assert not any(letters in reasoning + content for letters in MARKS)


@given(PIECES)
def test_without_tools_and_splitting_a_text_is_as_it_was(marked):
    text, offsets = place_controls(marked)
    reader = ReplyReader(None, begins_thinking=True, splits_thinking=False)
    assert summed_up(read(reader, text, offsets, [])) == ("", text, ())


def test_a_text_of_letters_has_no_calls():
    """Text that a client can make the model repeat is no structure."""
    for case in TEXTS:
        text, _ = case.place()
        if case.splits and "section_begin" in text:
            reasoning, content, calls = summed_up(read(reader_of(case), text, (), []))
            assert (reasoning + content, calls) == (text, ()), case.name


def test_deltas_come_as_they_are_written():
    reader = reader_of(ReplyText("", ""))
    assert reader.feed("Hel") == [ContentDelta("Hel")]
    assert reader.feed("lo <|tool") == [ContentDelta("lo ")]
    assert reader.feed("box") == [ContentDelta("<|toolbox")]
    text, offsets = place_controls(f"Hello <|toolbox{SB}{B}functions.a:0{A}")
    assert reader.feed(text[len("Hello <|toolbox") :], offsets) == []
    assert reader.feed('{"x') == [CallBegin(0, "functions.a:0", "a"), ArgumentsDelta(0, '{"x')]
    assert reader.feed('": 1') == [ArgumentsDelta(0, '": 1')]
    assert reader.feed("}") == [ArgumentsDelta(0, "}")]
    assert reader.feed(E, [len(text) + len('{"x": 1}')]) == [CallEnd(0, True)]


def test_tools_and_messages_that_are_malformed_do_not_fail():
    for odd in (None, 3, "a", [3], [{}], [{"function": 3}], [{"function": {"name": 3}}], [{"tool_calls": [3, {}]}]):
        tools = DeclaredTools(odd, odd)
        assert tools.first_number == 0
        assert tools.name_in("functions.a:0") is None
        assert tools.name_for("3", "{") is None
    assert DeclaredTools(
        [{"function": {"name": "a", "parameters": {"properties": {}, "required": 3}}}] * 2, []
    ).name_for("3", "[" * 100_000)
