"""A value that is too long is refused by its field's name before any work, wherever in the request it stands."""

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kimi_backend.errors import InvalidRequestError
from kimi_backend.serving.request_fields import ALIASES, INPUT_FIELDS
from kimi_backend.serving.request_limits import KIB, LIMITS, MIB
from kimi_backend.serving.request_values import collect_values


def texts(*values: str) -> Any:
    return np.array([value.encode() for value in values], dtype=object)


WORDS = "one two three " * MIB
LONG: dict[str, Callable[[], str]] = {
    "text_input": lambda: WORDS,
    "messages": lambda: json.dumps([{"role": "user", "content": WORDS}]),
    "tools": lambda: json.dumps([{"type": "function", "function": {"name": "f", "description": WORDS}}]),
    "logit_bias": lambda: json.dumps({str(i): 1.0 for i in range(200_000)}),
    "cache_salt": lambda: "s" * 2 * KIB,
    "chat_template_kwargs": lambda: json.dumps({"a": "b" * MIB}),
}
MANY: dict[str, Any] = {
    "bad_words": ["w"] * 100_000,
    "stop": ["s"] * 100_000,
    "stop_token_ids": [1] * 5000,
    "messages": [{"role": "user", "content": "a"}] * 5000,
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("place", ["input", "parameter", "sampling_parameters"])
def test_more_bytes_than_allowed(name: str, place: str) -> None:
    value = LONG[name]()
    tensors, parameters = {}, {}
    if place == "input":
        tensors[name] = texts(value)
    elif place == "parameter":
        parameters[name] = value
    else:
        tensors["sampling_parameters"] = texts(json.dumps({name: value}))
    start = time.thread_time()
    with pytest.raises(InvalidRequestError, match=rf"^({name}|sampling_parameters): \d+ bytes given, at most \d+ are"):
        collect_values(tensors, parameters)
    assert time.thread_time() - start < 1


@pytest.mark.parametrize("name", MANY)
def test_more_elements_than_allowed(name: str) -> None:
    nested = {"sampling_parameters": texts(json.dumps({name: MANY[name]}))}
    with pytest.raises(
        InvalidRequestError, match=rf"^{name}: {len(MANY[name])} elements given, at most \d+ are allowed"
    ):
        collect_values(nested, {})


def test_a_list_tensor_is_not_even_read() -> None:
    class Unread:
        def __init__(self, size: int) -> None:
            self.size = size

        def reshape(self, _: int) -> "Unread":
            return self

        def __len__(self) -> int:
            return self.size

    with pytest.raises(InvalidRequestError, match=r"^stop_words: 10000000 elements given, at most 1024 are allowed"):
        collect_values({"stop_words": Unread(10**7)}, {})


def test_what_is_allowed_passes() -> None:
    given = {
        "messages": texts(json.dumps([{"role": "user", "content": "a"}] * 4096)),
        "bad_words": texts(*["w"] * 1024),
    }
    values = collect_values(given, {"cache_salt": "s" * KIB})
    assert (len(values["messages"]), len(values["bad_words"]), len(values["cache_salt"])) == (4096, 1024, KIB)


def test_every_limit_is_of_a_field_and_every_text_or_list_has_one() -> None:
    names = {field.name for field in INPUT_FIELDS}
    assert set(LIMITS) <= names
    lists = {f.name for f in INPUT_FIELDS if f.kind.is_list or f.kind.data_type == "TYPE_STRING"}
    assert {ALIASES.get(name, name) for name in lists} == set(LIMITS)
