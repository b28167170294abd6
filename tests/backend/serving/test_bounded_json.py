"""JSON of a stranger has the value that `json.loads` gives it, up to a number of values, and lets other threads run."""

import json
from typing import Any

import pytest

from kimi_backend.errors import InvalidRequestError
from kimi_backend.serving.bounded_json import MOST_VALUES, parse_json
from kimi_backend.serving.incoming import read_parameters
from support.thread_turns import chances_beside

TEXTS = [
    "null",
    "[]",
    "{}",
    ' [1, -2.5e3, true, false, null, "\\u00e4\\n\\ud83d\\ude00"] ',
    '{"a": [{"b": {}}, []], "a": {"c": [[1], [2, [3]]]}, "": "ö"}',
    "[Infinity, -Infinity, 12345678901234567890]",
    json.dumps([{"role": "user", "content": "word " * 1000}] * 50),
]
BROKEN = ["", "[", "[1,]", "[1 2]", '{"a"}', '{"a": 1,}', "{1: 2}", '["a', "[1]]", "nul", '["\n"]', "9" * 5000]


@pytest.mark.parametrize("text", TEXTS)
def test_the_same_value(text: str) -> None:
    assert parse_json("messages", text) == json.loads(text)


@pytest.mark.parametrize("text", [*BROKEN, "[" * 100_000], ids=range(len(BROKEN) + 1))
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        json.loads(text)
    with pytest.raises(InvalidRequestError, match=r"^messages: not valid JSON: "):
        parse_json("messages", text)


@pytest.mark.parametrize(
    "make", [lambda n: [0] * n, lambda n: {str(i): 0 for i in range(n)}, lambda n: [[0] * (n - 1)]]
)
def test_so_many_values_and_no_more(make: Any) -> None:
    assert parse_json("tools", json.dumps(make(100)), 100) == make(100)
    with pytest.raises(InvalidRequestError, match=r"^tools: more than 100 JSON values given$"):
        parse_json("tools", json.dumps(make(101)), 100)


def test_other_threads_run_meanwhile() -> None:
    text = json.dumps([[]] * MOST_VALUES)
    assert chances_beside(lambda: json.loads(text)) < MOST_VALUES / 100
    assert chances_beside(lambda: parse_json("messages", text)) > MOST_VALUES


def test_a_request_has_a_thousand_parameters_at_most() -> None:
    most = {f"p{number}": 1 for number in range(1024)}
    assert read_parameters(json.dumps(most)) == most
    with pytest.raises(InvalidRequestError, match="parameters: "):
        read_parameters(json.dumps(most | {"one more": 1}))
