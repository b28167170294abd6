"""The values of a body are counted as a parser would, wherever its text is cut; many errors cost as much as one."""

import asyncio
import json
import random
from typing import Any

import pydantic
import pytest

from kimi_backend.serving.request_limits import LIMITS
from kimi_openai import body_values
from kimi_openai.body_values import PIECE_BYTES, check_values
from kimi_openai.errors import ApiError
from kimi_openai.request_fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from kimi_openai.request_parsing import parse_body, shown
from kimi_openai.server_fields import completion_fields

TEXTS = ["", "a, b: [c] {d}", 'say "hi", ', "\\", '\\\\"', 'back\\slash\\"', "é, ü", "\\" * 9]


def made_value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.choice(["text", "number", "list", "object"] if depth < 5 else ["text", "number"])
    if kind == "text":
        return "".join(draw.choices(TEXTS, k=3))
    if kind == "number":
        return draw.choice([1, -2.5, True, None])
    values = [made_value(draw, depth + 1) for _ in range(draw.randrange(5))]
    return values if kind == "list" else {f"{draw.choice(TEXTS)}{i}": value for i, value in enumerate(values)}


def counts(value: Any) -> tuple[int, int]:
    """Lists, objects and entries; and the commas between values."""
    if not isinstance(value, (list, dict)):
        return 0, 0
    inside = [counts(item) for item in (value.values() if isinstance(value, dict) else value)]
    entries = 1 + (len(value) if isinstance(value, dict) else 0)
    return entries + sum(one for one, _ in inside), max(0, len(value) - 1) + sum(other for _, other in inside)


@pytest.mark.parametrize("piece_bytes", [1, 2, 7, PIECE_BYTES])
def test_bodies_are_counted_as_they_are_parsed(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_values, "SHORT_BYTES", 0)
    draw = random.Random(piece_bytes)
    for _ in range(60):
        value = made_value(draw)
        body = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode()
        for name, count in zip(("MOST_ENTRIES", "MOST_ELEMENTS"), counts(value), strict=True):
            for most in (count, count - 1):
                monkeypatch.setattr(body_values, "MOST_ENTRIES", most if name == "MOST_ENTRIES" else 10**9)
                monkeypatch.setattr(body_values, "MOST_ELEMENTS", most if name == "MOST_ELEMENTS" else 10**9)
                assert is_taken(body, piece_bytes) == (most == count), (value, name, count)


def is_taken(body: bytes, piece_bytes: int = PIECE_BYTES) -> bool:
    try:
        asyncio.run(check_values(body, piece_bytes))
    except ApiError:
        return False
    return True


@pytest.mark.parametrize(
    ("value", "passes"),
    [
        (b"[" + b",".join([b"1"] * 524_288) + b"]", True),
        (b"[" + b",".join([b"1"] * 524_290) + b"]", False),
        (b"[" + b",".join([b"[]"] * 32_767) + b"]", True),
        (b"[" + b",".join([b"[]"] * 32_768) + b"]", False),
        (json.dumps("a, b: [c], " * 10**5).encode(), True),
    ],
)
def test_so_many_values_may_be(value: bytes, passes: bool) -> None:
    assert is_taken(value) == passes


def test_others_have_their_turns_while_a_long_body_is_counted() -> None:
    turns = 0

    async def beside() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def count() -> None:
        other = asyncio.create_task(beside())
        await check_values(json.dumps("a" * 2**21).encode())
        other.cancel()

    asyncio.run(count())
    assert turns >= 64


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (CompletionRequest, {"stop": [1] * 9}, r"stop\[0\]: 1 given, input should be a valid string"),
        (CompletionRequest, {"bad_words": ["a"] + [None] * 9}, r"bad_words\[1\]: None given, .*"),
        (CompletionRequest, {"stop_token_ids": ["a"] * 9}, r"stop_token_ids\[0\]: 'a' given, .*"),
        (CompletionRequest, {"allowed_token_ids": [2**40] * 9}, r"allowed_token_ids\[0\]: 1099511627776 given, .*"),
        (CompletionRequest, {"logit_bias": {"1": 2, "3": "a", "5": None}}, r"logit_bias\.3: 'a' given, .*"),
        (CompletionRequest, {"logit_bias": {"1": 1e39, "3": True}}, r"logit_bias\.1: 1e\+39 given, .*"),
        (DetokenizeRequest, {"tokens": [-1] * 9}, r"tokens\[0\]: -1 given, .*"),
    ],
)
def test_the_first_wrong_value_is_told_and_the_others_are_not_looked_at(
    kind: type[pydantic.BaseModel], fields: dict[str, Any], message: str
) -> None:
    whole = {"prompt": "x", **fields} if kind is CompletionRequest else fields
    with pytest.raises(pydantic.ValidationError) as found:
        kind.model_validate(whole)
    assert found.value.error_count() == 1
    with pytest.raises(ApiError, match=f"^{message}$"):
        parse_body(json.dumps(whole).encode(), kind)


@pytest.mark.parametrize(
    ("kind", "name", "one"),
    [
        (CompletionRequest, "stop", "a"),
        (CompletionRequest, "bad_words", "a"),
        (CompletionRequest, "stop_token_ids", 1),
        (ChatRequest, "messages", {}),
        (ChatRequest, "tools", {}),
        (TokenizeRequest, "messages", {}),
        (TokenizeRequest, "tools", {}),
        (CompletionRequest, "logit_bias", None),
    ],
)
def test_lists_are_no_longer_than_the_server_takes_them(kind: type[pydantic.BaseModel], name: str, one: Any) -> None:
    most = LIMITS[name].num_items
    assert most is not None
    needed = {CompletionRequest: {"prompt": "x"}, ChatRequest: {"messages": []}}.get(kind, {})

    def fields(count: int) -> bytes:
        value = {str(number): 1 for number in range(count)} if name == "logit_bias" else [one] * count
        return json.dumps({**needed, name: value}).encode()

    assert len(getattr(parse_body(fields(most), kind), name)) == most
    with pytest.raises(ApiError, match=rf"^{name}: .*\.\.\. given, at most {most} of them are allowed$"):
        parse_body(fields(most + 1), kind)


def test_a_long_value_is_quoted_by_its_beginning() -> None:
    class Unread(list[Any]):
        def __iter__(self) -> Any:
            yield from range(40)
            raise AssertionError("it is read on")

    for value in ([], {}, "a'b", [1, [None, {"a": "b"}], {}], {"k": [1.5, True]}, list(range(20)), "x" * 78):
        assert shown(value) == repr(value)
    for value in (list(range(99)), "x" * 79, {str(i): [i] for i in range(99)}, [["y" * 99]]):
        assert shown(value) == repr(value)[:77] + "..."
    assert len(shown(Unread([0]))) == 80


def test_more_choices_than_a_call_may_have_are_refused_before_a_request_is_made_of_each() -> None:
    with pytest.raises(ApiError, match=r"^prompt: 17 prompts of 16 choices each given, at most 256"):
        completion_fields(CompletionRequest(prompt=["a"] * 17, n=16))
    with pytest.raises(ApiError, match=r"^prompt: 257 given, at most 256"):
        completion_fields(CompletionRequest(prompt=["a"] * 257))
    assert len(completion_fields(CompletionRequest(prompt=["a"] * 128, n=2))) == 128
