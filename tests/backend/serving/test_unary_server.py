"""`spec_ensemble_unary` over a scripted `spec_ensemble`: what it hands on, and what it makes of every answer."""

import json
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kimi_backend.errors import InvalidRequestError
from kimi_backend.serving import unary_server
from kimi_backend.serving.unary_server import UnaryServer, read_call
from support import fake_pb_utils
from support.fake_pb_utils import InferenceResponse, RecordingSender, Tensor, TritonError
from support.waiting import PATIENCE_S, wait_for

TEXT = np.array([[b"hi"]], dtype=np.object_)
OK = InferenceResponse([Tensor("text_output", TEXT)])


class Request(fake_pb_utils.Request):
    """A client's request; keeps what is sent back."""

    def __init__(self, parameters: dict[str, Any] | str = "", **tensors: Any) -> None:
        super().__init__({name: np.array(value) for name, value in tensors.items()})
        self.sender = RecordingSender()
        self._parameters = parameters if isinstance(parameters, str) else json.dumps(parameters)

    def parameters(self) -> str:
        return self._parameters

    def request_id(self) -> str:
        return "r1"

    def requested_output_names(self) -> list[str]:
        return ["text_output"]

    def get_response_sender(self) -> RecordingSender:
        return self.sender

    @property
    def error(self) -> str:
        ((response, flags),) = self.sender.sent
        assert flags == fake_pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        message: str = response.error().message()
        return message


class Ensemble:
    """Answers every call with the same responses, or fails; holds calls up until it may answer."""

    def __init__(self, *responses: InferenceResponse, fails: str = "") -> None:
        self.calls: list[dict[str, Any]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

        def execute(decoupled: bool) -> Any:
            assert decoupled
            assert self.may_answer.wait(PATIENCE_S)
            if fails:
                raise fake_pb_utils.TritonModelException(fails)
            return iter(responses)

        def request(**given: Any) -> SimpleNamespace:
            self.calls.append(given)
            return SimpleNamespace(exec=execute)

        self.utilities = SimpleNamespace(**vars(fake_pb_utils), InferenceRequest=request)

    def answer(self, *requests: Request) -> None:
        server = UnaryServer(self.utilities)
        assert server.accept(list(requests)) == [None] * len(requests)
        server.close()


def test_a_request_is_handed_on_and_answered_once() -> None:
    ensemble, request = Ensemble(OK), Request({"seed": 3}, text_input=[["a"]])
    ensemble.answer(request)
    (call,) = ensemble.calls
    assert (call["model_name"], call["request_id"]) == ("spec_ensemble", "r1")
    assert (call["parameters"], call["requested_output_names"]) == ({"seed": 3, "stream": False}, ["text_output"])
    assert [(tensor.name(), tensor.as_numpy().tolist()) for tensor in call["inputs"]] == [("text_input", [["a"]])]
    ((response, flags),) = request.sender.sent
    assert (flags, response.has_error()) == (fake_pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL, False)
    assert request.sender.outputs("text_output") == [b"hi"]


def test_a_stream_is_refused_wherever_it_is_asked_for() -> None:
    for request in (Request(stream=[True]), Request({"stream": True})):
        with pytest.raises(InvalidRequestError, match="stream: true given, this model answers once"):
            read_call(request)
    for request in (Request(stream=[False]), Request({"stream": False})):
        call = read_call(request)
        assert (call.arrays, call.parameters) == ({}, {"stream": False})


def test_floats_among_parameters_go_as_json_and_the_servers_own_stay_behind() -> None:
    call = read_call(Request({"temperature": 0.5, "seed": 1, "min_p": None, "triton_x": 1}))
    floats = call.parameters["sampling_parameters"]
    assert json.loads(str(floats)) == {"temperature": 0.5, "min_p": None}
    assert dict(call.parameters) == {"seed": 1, "sampling_parameters": floats, "stream": False}
    for request in (
        Request({"temperature": 0.5, "sampling_parameters": "{}"}),
        Request({"temperature": 0.5}, sampling_parameters=["{}"]),
    ):
        with pytest.raises(InvalidRequestError, match="temperature: given beside sampling_parameters"):
            read_call(request)


@pytest.mark.parametrize(
    ("ensemble", "message"),
    [
        (Ensemble(InferenceResponse(error=TritonError("INVALID_ARG: top_p: 2"))), "INVALID_ARG: top_p: 2"),
        (Ensemble(InferenceResponse(error=TritonError("it is not ready"))), "UNAVAILABLE: spec_ensemble is not ready"),
        (Ensemble(InferenceResponse(error=TritonError("oops: so"))), "INTERNAL: oops: so"),
        (Ensemble(fails="model is not ready"), "UNAVAILABLE: spec_ensemble is not ready"),
        (Ensemble(fails="it broke"), "INTERNAL: it broke"),
        (Ensemble(OK, OK), "INTERNAL: internal error (ValueError); the server's log has the details"),
    ],
)
def test_an_error_keeps_its_code(ensemble: Ensemble, message: str) -> None:
    request = Request(text_input=[["a"]])
    ensemble.answer(request)
    assert request.error == message


def test_a_bad_request_fails_alone() -> None:
    bad, good = Request(stream=[True]), Request(text_input=[["a"]])
    Ensemble(OK).answer(bad, good)
    assert bad.error.startswith("INVALID_ARG: stream: true given")
    assert good.sender.outputs("text_output") == [b"hi"]


def test_no_more_are_under_way_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unary_server, "MOST_UNARY_CALLS", 2)
    ensemble = Ensemble(OK)
    ensemble.may_answer.clear()
    server = UnaryServer(ensemble.utilities)
    requests = [Request(text_input=[["a"]]) for _ in range(3)]
    server.accept([Request(stream=[True]), *requests])
    assert requests[2].error == "UNAVAILABLE: 2 requests are under way, no more may be; try later"
    ensemble.may_answer.set()
    wait_for(lambda: all(request.sender.sent for request in requests))
    later = [Request(text_input=[["a"]]) for _ in range(2)]
    server.accept(later)
    server.close()
    assert all(request.sender.outputs("text_output") == [b"hi"] for request in later)


def test_a_client_that_has_gone_harms_nobody() -> None:
    request = Request(text_input=[["a"]])
    request.sender = RecordingSender(fails=True)
    Ensemble(OK).answer(request)
    assert request.sender.num_begun == 1
