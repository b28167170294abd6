"""What crosses the server as JSON: a runner's description, and the parameters of a model's config.pbtxt."""

import dataclasses
import json
from typing import Any

import numpy as np

from kimi_backend.errors import InvalidRequestError
from kimi_backend.types.plan import RunnerDescription


def model_parameters(args: dict[str, str]) -> dict[str, str]:
    """config.pbtxt parameters out of the arguments that the server hands to `initialize`."""
    parameters = json.loads(args["model_config"]).get("parameters", {})
    return {name: value["string_value"] for name, value in parameters.items()}


def description_to_json(description: RunnerDescription) -> np.ndarray[Any, np.dtype[np.object_]]:
    """A description as the server carries it: one JSON string."""
    fields = dataclasses.asdict(description)
    fields["aux_buffer"] = None if description.aux_buffer is None else description.aux_buffer.hex()
    return np.array([json.dumps(fields)], dtype=np.object_)


def description_from_json(text: str | bytes) -> RunnerDescription:
    """The other way round.

    Raises:
        InvalidRequestError: another version's fields.
    """
    fields = json.loads(text)
    buffer = fields.get("aux_buffer")
    fields["aux_buffer"] = None if buffer is None else bytes.fromhex(buffer)
    for name in ("aux_layer_ids", "pretences"):
        fields[name] = tuple(fields.get(name, ()))
    try:
        return RunnerDescription(**fields)
    except TypeError as error:
        raise InvalidRequestError(f"runner description does not fit this version: {error}") from error
