"""docs/protocol.md, the config.pbtxt files and the code name the same tensors; the runners answer as it says."""

import re
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from kimi_backend.serving import tensor_names
from kimi_backend.serving.descriptions import description_from_json
from support.raw_streams import raw_input, secret_input

ROOT = Path(__file__).resolve().parents[2]
TENSOR = re.compile(r'name: "([A-Z_]+)", data_type: TYPE_(\w+), dims: (\[[^\]]*\])')


def documented():
    """{(model, direction): {name: (type, shape)}} out of the table of docs/protocol.md."""
    found = {}
    rows = re.findall(r"^\| (both|target|draft) \| (in|out) `(\w+)` \| (\w+) (\[[^\]]*\]) \|", _protocol(), re.M)
    for who, direction, name, datatype, shape in rows:
        for model in ("kimi_target", "eagle3_draft"):
            if who == "both" or who in model:
                found.setdefault((model, direction), {})[name] = (datatype, shape.replace(" ", ""))
    return found


def _protocol():
    return (ROOT / "docs/protocol.md").read_text()


def configured(model):
    text = (ROOT / f"model_repository/{model}/config.pbtxt").read_text()
    head, tail = text.split("output [")
    inputs, outputs = head.split("input [")[1], tail.split("instance_group")[0]
    return tuple({n: (t, s.replace(" ", "")) for n, t, s in TENSOR.findall(part)} for part in (inputs, outputs))


@pytest.mark.parametrize("model", ["kimi_target", "eagle3_draft"])
def test_config_and_document_agree(model):
    inputs, outputs = configured(model)
    assert documented()[(model, "in")] == inputs
    assert documented()[(model, "out")] == outputs


def test_every_name_of_the_code_is_documented():
    names = {value for key, value in vars(tensor_names).items() if key.isupper()}
    assert names == {name for tensors in documented().values() for name in tensors}


@pytest.fixture
def client(url):
    with grpcclient.InferenceServerClient(url) as connected:
        yield connected


@pytest.fixture
def secret(server):
    return secret_input(server)


@pytest.mark.parametrize("model", ["kimi_target", "eagle3_draft"])
def test_a_runner_describes_itself(client, secret, model):
    reply = client.infer(model, [secret, raw_input("DESCRIBE", np.ones(1, dtype=np.bool_), "BOOL")])
    description = description_from_json(reply.as_numpy("DESCRIPTION")[0])
    assert description.role == ("target" if model == "kimi_target" else "draft")
    assert description.device == "cpu"


@pytest.mark.parametrize("model", ["kimi_target", "eagle3_draft"])
@pytest.mark.parametrize("plan", [np.zeros(0, np.uint8), np.arange(256, dtype=np.uint8), np.zeros(4096, np.uint8)])
def test_bytes_that_are_no_plan_are_refused(client, secret, model, plan):
    asked_for = [raw_input("STEP", np.ones(1, np.int64), "INT64")] if model == "kimi_target" else []
    with pytest.raises(InferenceServerException, match="plan"):
        client.infer(model, [secret, raw_input("PLAN", plan, "UINT8"), *asked_for])


@pytest.mark.parametrize("model", ["kimi_target", "eagle3_draft"])
def test_a_request_for_nothing_is_refused(client, secret, model):
    with pytest.raises(InferenceServerException, match="DESCRIBE is needed, none was given"):
        client.infer(model, [secret])
