"""Whatever stands in a field, a request is taken, or refused for what its client sent: nothing else is raised."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import InvalidRequestError
from kimi_backend.grammar.schema_checks import KEYWORDS
from kimi_backend.scheduler.admission import check_sampling
from kimi_backend.serving.incoming import read_parameters
from kimi_backend.serving.request_fields import INPUT_FIELDS, Kind, RequestField
from kimi_backend.serving.spec_ensemble_server import make_parser

NANO = Path(__file__).parents[3] / "demo" / "kimi-nano"
NUM_REQUESTS = 2000
MAX_PROMPT_TOKENS = 500
DTYPES = {"TYPE_INT32": np.int32, "TYPE_UINT64": np.uint64, "TYPE_FP32": np.float32, "TYPE_BOOL": np.bool_}
INTEGERS = (0, 1, -1, 20, 64, 2**31 - 1, -(2**31), 2**64 - 1, 10**400)
NUMBERS = (*INTEGERS, 0.5, -0.0, 1e-45, 3.4e38, 1e308, float("nan"), float("inf"), float("-inf"))
TEXTS = ("", "x", "\0", "\ud800", "é\u2028\u202e", "</think>", "[" * 2000, "1e999", "x" * 3000)
BYTES = (*(text.encode("utf-8", "surrogatepass") for text in TEXTS), b"\xff", b"\xc0\x80", b"\xf8\x88\x80\x80\x80")
NAMES = ("role", "content", "type", "function", "name", "parameters", "arguments", "strict", "id", "1", "", "\ud800")


def json_value(draw: random.Random, depth: int = 3) -> Any:
    kind = draw.random()
    if kind < 0.3 or not depth:
        return draw.choice((*NUMBERS, *TEXTS, None, True))
    if kind < 0.6:
        return [json_value(draw, depth - 1) for _ in range(draw.randint(0, 2))]
    return {draw.choice(NAMES): json_value(draw, depth - 1) for _ in range(draw.randint(0, 3))}


def schema(draw: random.Random) -> Any:
    kind = draw.choice(list(KEYWORDS))
    names = (*KEYWORDS[kind], "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs")
    return {"type": kind, **{name: json_value(draw, draw.choice((0, 2))) for name in draw.sample(names, 1)}}


def json_field(draw: random.Random, name: str) -> Any:
    """A value that often begins as the field's should."""
    if draw.random() < 0.3:
        return json_value(draw)
    inner = schema(draw) if draw.random() < 0.7 else json_value(draw)
    function = {"name": "f", "parameters": inner, "strict": True}
    message = {"role": draw.choice(("user", "assistant", "tool")), draw.choice(NAMES): json_value(draw)}
    begun: dict[str, Any] = {
        "messages": [message, {"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "response_format": {"type": "json_schema", "json_schema": {"schema": inner}},
        "structured_outputs": {draw.choice(("json", "regex", "choice", "grammar")): inner},
        "logit_bias": {draw.choice(("1", "-1", "x", "9" * 30)): draw.choice(NUMBERS)},
        "sampling_parameters": {draw.choice(INPUT_FIELDS).name: json_value(draw)},
    }
    return begun.get(name, inner)


def tensor(draw: random.Random, field: RequestField) -> Any:
    count = draw.choice((0, 1, 2, 1025)) if field.kind.is_list else draw.choice((1, 1, 1, 0, 2))
    if field.kind.data_type != "TYPE_STRING":
        with np.errstate(all="ignore"):
            numbers = np.array([draw.choice(NUMBERS[:8] if draw.random() < 0.5 else NUMBERS[9:]) for _ in range(count)])
            array = numbers.astype(DTYPES[field.kind.data_type])
    elif field.kind is Kind.JSON and draw.random() < 0.8:
        array = np.array([json.dumps(json_field(draw, field.name)).encode() for _ in range(count)], dtype=np.object_)
    else:
        array = np.array([draw.choice(BYTES) for _ in range(count)], dtype=np.object_)
    return array.reshape(draw.choice(((1, -1), (1, -1), (-1,), (-1, 1, 1))))


def parameter(draw: random.Random, field: RequestField) -> Any:
    return json_field(draw, field.name) if field.kind is Kind.JSON else json_value(draw)


def test_every_request_is_taken_or_refused() -> None:
    parser, tokenizer = make_parser(ServingSettings(checkpoint=str(NANO)))
    num_taken = 0
    for seed in range(NUM_REQUESTS):
        draw = random.Random(seed)
        fields = draw.sample(INPUT_FIELDS, draw.randint(0, 3))
        tensors = {"text_input": np.array([[b"once"]], dtype=np.object_)} if draw.random() < 0.6 else {}
        tensors |= {field.name: tensor(draw, field) for field in fields[:2]}
        parameters = {field.name: parameter(draw, field) for field in fields[2:]}
        try:
            given = read_parameters(json.dumps(parameters))
            parsed = parser.parse("r", tensors, given, MAX_PROMPT_TOKENS)
            check_sampling(parsed.generate.sampling, tokenizer.vocab_size)
            num_taken += 1
        except InvalidRequestError:
            continue
        except Exception as error:
            pytest.fail(f"seed {seed}: {error!r} for {tensors} {parameters}")
    assert num_taken > 0.1 * NUM_REQUESTS
