"""A runner's description over the server arrives as it left; another version's is a runner that is away."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from kimi_backend.errors import ModelUnavailableError
from kimi_backend.serving import tensor_names as names
from kimi_backend.serving.aux_transfer import AuxTransfer
from kimi_backend.serving.bls_models import BlsDraft, BlsTarget
from kimi_backend.serving.descriptions import description_from_json, description_to_json, model_parameters
from support import fake_pb_utils
from support.loopback_server import SECRET
from support.scripted_logits import LogitScript
from support.scripted_models import describe

DESCRIPTION = dataclasses.replace(
    describe("draft", LogitScript(32)), aux_buffer=b"\x00\xff", synthetic_parts=("routing",)
)


def test_it_arrives_as_it_left() -> None:
    assert description_from_json(description_to_json(DESCRIPTION)[0]) == DESCRIPTION


def answering(text: str) -> SimpleNamespace:
    """Server utilities whose every model describes itself so."""
    tensor = fake_pb_utils.Tensor(names.DESCRIPTION, np.array([text], dtype=np.object_))
    request = SimpleNamespace(exec=lambda: fake_pb_utils.InferenceResponse([tensor]))
    return SimpleNamespace(**vars(fake_pb_utils), InferenceRequest=lambda **_: request)


@pytest.mark.parametrize("model", [BlsTarget, BlsDraft])
@pytest.mark.parametrize(
    "change",
    [{"a_field_of_tomorrow": 1}, {"vocab_size": None}, {"aux_buffer": "not hexadecimal"}],
    ids=["field too many", "field too few", "no handle"],
)
def test_a_description_of_another_version_is_a_runner_that_is_away(
    model: type[BlsTarget | BlsDraft], change: dict[str, object]
) -> None:
    """The engine goes on without it, or waits; it must not end."""
    fields = json.loads(description_to_json(DESCRIPTION)[0]) | change
    text = json.dumps({name: value for name, value in fields.items() if name != "vocab_size" or value is not None})
    with pytest.raises(ModelUnavailableError, match="some_model"):
        model(answering(text), "some_model", AuxTransfer(), secret=SECRET).describe()


def test_an_answer_that_is_no_json_is_a_runner_that_is_away() -> None:
    with pytest.raises(ModelUnavailableError, match="some_model"):
        BlsDraft(answering("{"), "some_model", AuxTransfer(), secret=SECRET).describe()


def test_parameters_of_a_model_are_names_and_texts() -> None:
    config = {"parameters": {"checkpoint": {"string_value": "/x"}}}
    assert model_parameters({"model_config": json.dumps(config)}) == {"checkpoint": "/x"}
    assert model_parameters({"model_config": "{}"}) == {}
