"""The values that cross the server as JSON: a runner's description, and the parameters of a model's config.pbtxt."""

import dataclasses
import json
from typing import Any

import numpy as np

from kimi_backend.errors import InvalidRequestError
from kimi_backend.types.plan import RunnerDescription

_HANDLES = ("aux_buffer", "semaphores")
"""Bytes, as hexadecimal digits."""


def model_parameters(args: dict[str, str]) -> dict[str, str]:
    """config.pbtxt parameters out of the arguments that the server hands to `initialize`."""
    parameters = json.loads(args["model_config"]).get("parameters", {})
    return {name: value["string_value"] for name, value in parameters.items()}


def description_to_json(description: RunnerDescription) -> np.ndarray[Any, np.dtype[np.object_]]:
    """A description as the server carries it: one JSON string."""
    fields = dataclasses.asdict(description)
    for name in _HANDLES:
        fields[name] = None if fields[name] is None else fields[name].hex()
    return np.array([json.dumps(fields)], dtype=np.object_)


def description_from_json(text: str | bytes) -> RunnerDescription:
    """The other way round.

    Raises:
        InvalidRequestError: another version's fields.
    """
    fields = json.loads(text)
    for name in _HANDLES:
        fields[name] = None if fields.get(name) is None else bytes.fromhex(fields[name])
    for name in ("aux_layer_ids", "synthetic_parts"):
        fields[name] = tuple(fields.get(name, ()))
    try:
        return RunnerDescription(**fields)
    except TypeError as error:
        raise InvalidRequestError(f"runner description does not fit this version: {error}") from error
