"""The tensors of `spec_ensemble`: fields to inputs, outputs to chunks."""

import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from kimi_client._errors import InvalidRequest
from kimi_client._fields import INPUT_TYPES, JSON_INPUTS
from kimi_client._types import Chunk, PromptLogprob, TokenLogprob

MODEL_NAME = "spec_ensemble"

_NUMPY_TYPES: dict[str, Any] = {
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "BOOL": np.bool_,
    "BYTES": np.object_,
}


def _as_array(name: str, value: Any) -> np.ndarray[Any, Any]:
    kind = INPUT_TYPES[name]
    try:
        if name in JSON_INPUTS and not isinstance(value, str):
            value = json.dumps(_with_text_keys(value))
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if kind == "BYTES":
            values = [v.encode("utf-8") if isinstance(v, str) else v for v in values]
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name}: cannot be sent: {error}") from error
    dtype = _NUMPY_TYPES[kind]
    if kind in ("INT32", "UINT64"):
        limits = np.iinfo(dtype)
        if not all(isinstance(v, (int, np.integer)) and limits.min <= v <= limits.max for v in values):
            raise InvalidRequest(f"{name}: {value!r} given, integers from {limits.min} to {limits.max} are allowed")
    try:
        return np.array(values, dtype=dtype).reshape(1, -1)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name}: {value!r} given: {error}") from error


def _with_text_keys(value: Any) -> Any:
    """Token ids as text, as JSON wants keys, also those that came out of an array."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(operator.index(key)): item for key, item in value.items()}
    return value


@dataclass(frozen=True, slots=True)
class InputTensor:
    """A named tensor with its batch dimension."""

    name: str
    datatype: str
    array: np.ndarray[Any, Any]


def build_inputs(fields: dict[str, Any]) -> list[InputTensor]:
    """Input tensors for the fields that are not None.

    Raises:
        InvalidRequest: a field nobody knows, or a value that its type cannot hold.
    """
    inputs = []
    for name, value in fields.items():
        if value is None:
            continue
        if name not in INPUT_TYPES:
            raise InvalidRequest(f"{name}: unknown field; known: {', '.join(INPUT_TYPES)}")
        inputs.append(InputTensor(name, INPUT_TYPES[name], _as_array(name, value)))
    return inputs


def _text(result: grpcclient.InferResult, name: str) -> str:
    array = result.as_numpy(name)
    if array is None or array.size == 0:
        return ""
    value = array.reshape(-1)[0]
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def _ids(result: grpcclient.InferResult, name: str) -> tuple[int, ...]:
    array = result.as_numpy(name)
    return () if array is None else tuple(array.reshape(-1).tolist())


def _count(result: grpcclient.InferResult, name: str) -> int:
    array = result.as_numpy(name)
    return 0 if array is None else int(array.reshape(-1)[0])


def _flag(result: grpcclient.InferResult, name: str) -> bool:
    array = result.as_numpy(name)
    return array is not None and bool(array.any())


def _logprobs(text: str) -> tuple[TokenLogprob, ...]:
    entries = json.loads(text) if text else []
    return tuple(TokenLogprob(logprob=entry["logprob"], **_tokens(entry)) for entry in entries)


def _prompt_logprobs(text: str) -> tuple[PromptLogprob, ...]:
    entries = json.loads(text) if text else []
    return tuple(PromptLogprob(logprob=entry["logprob"], rank=entry["rank"], **_tokens(entry)) for entry in entries)


def _tokens(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Read what an entry says of its token and of the most likely ones."""
    return {
        "token_id": entry["token_id"],
        "token": entry["token"],
        "top": tuple((top["token_id"], top["logprob"]) for top in entry["top"]),
        "top_tokens": tuple(top["token"] for top in entry["top"]),
    }


def parse_chunk(result: grpcclient.InferResult) -> Chunk:
    """One response's tensors as a chunk."""
    text = _text(result, "statistics")
    statistics = json.loads(text) if text else {}
    stop_token_id = statistics.get("stop_token_id")
    return Chunk(
        text=_text(result, "text_output"),
        num_tokens=_count(result, "num_output_tokens"),
        num_prompt_tokens=_count(result, "num_input_tokens"),
        token_ids=_ids(result, "output_ids"),
        prompt_token_ids=_ids(result, "prompt_token_ids"),
        token_origins=_ids(result, "token_origins"),
        token_offsets=_ids(result, "token_offsets"),
        control_offsets=_ids(result, "control_offsets"),
        begins_thinking=_flag(result, "begins_thinking"),
        logprobs=_logprobs(_text(result, "logprobs")),
        prompt_logprobs=_prompt_logprobs(_text(result, "prompt_logprobs")),
        finish_reason=_text(result, "finish_reason") or None,
        stop_reason=(_text(result, "stop_reason") or None) if stop_token_id is None else stop_token_id,
        statistics=statistics,
    )


def is_final(result: grpcclient.InferResult) -> bool:
    """Tell whether this is the last response of its request."""
    parameters = result.get_response().parameters
    return "triton_final_response" in parameters and bool(parameters["triton_final_response"].bool_param)
