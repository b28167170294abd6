"""Each request gets all of its text and one final response, whenever its deltas come."""

import threading
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kimi_backend.serving import response_sender
from kimi_backend.serving.request_parser import ParsedRequest
from kimi_backend.serving.response_sender import ResponseSender
from kimi_backend.types.request import (
    EndCause,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
)
from support import fake_pb_utils
from support.waiting import PATIENCE_S

FINAL = 1


class ServerError(Exception):
    """Stands for `TritonError`."""

    INTERNAL, CANCELLED = "INTERNAL", "CANCELLED"

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)


class Client:
    """A response sender of the server that keeps what it sends; `hold` makes the first send wait."""

    def __init__(self, hold: bool = False) -> None:
        self.text = ""
        self.num_final = 0
        self.is_sending = threading.Event()
        self.may_send = threading.Event()
        self.is_done = threading.Event()
        if not hold:
            self.may_send.set()

    def send(self, response: types.SimpleNamespace, flags: int) -> None:
        self.is_sending.set()
        assert self.may_send.wait(PATIENCE_S)
        tensors = {tensor.name: tensor.values for tensor in response.output_tensors}
        self.text += tensors["text_output"][0, 0].decode()
        self.num_final += flags
        if flags:
            self.is_done.set()

    def is_cancelled(self) -> bool:
        return False


@pytest.fixture
def sender() -> ResponseSender:
    server = types.SimpleNamespace(
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
        TritonModelException=ServerError,
        TritonError=ServerError,
        Tensor=lambda name, values: types.SimpleNamespace(name=name, values=values),
        InferenceResponse=types.SimpleNamespace,
    )
    return ResponseSender(server, cancel=lambda request_id: None)


def register(sender: ResponseSender, request_id: str, client: Client) -> Callable[[str, bool], None]:
    """Returns a function that puts a delta."""
    generate = GenerateRequest(request_id=request_id, prompt_token_ids=(1,), sampling=SamplingParams())
    sender.register(request_id, client, ParsedRequest(generate=generate, stream=True, return_token_ids=False))

    def put(text: str, is_final: bool) -> None:
        reason = FinishReason.LENGTH if is_final else None
        sender.put(TokenDelta(request_id=request_id, token_ids=(1,), text=text, finish_reason=reason))

    return put


@pytest.mark.parametrize("is_final", [True, False], ids=["the last delta", "another delta"])
def test_a_delta_that_comes_between_a_turn_and_its_sending(sender: ResponseSender, is_final: bool) -> None:
    """It leaves with the delta before it; the turn that was taken for it finds nothing and must do no harm."""
    slow, quick, after = Client(hold=True), Client(), Client()
    put_slow, put_quick, put_after = (
        register(sender, name, client) for name, client in (("slow", slow), ("quick", quick), ("after", after))
    )
    put_slow("a", True)
    assert slow.is_sending.wait(PATIENCE_S)
    blocker = Client(hold=True)
    put_blocker = register(sender, "blocker", blocker)
    put_blocker("b", True)
    put_quick("first ", False)
    slow.may_send.set()
    assert blocker.is_sending.wait(PATIENCE_S), "a turn with blocker, then quick, is under way"
    put_quick("second", is_final)
    blocker.may_send.set()
    put_after("c", True)
    assert after.is_done.wait(PATIENCE_S), "the sending thread has died"
    if not is_final:
        put_quick("!", True)
    assert quick.is_done.wait(PATIENCE_S)
    sender.close(PATIENCE_S)
    assert not sender._thread.is_alive()
    assert quick.text == ("first second" if is_final else "first second!")
    assert [client.num_final for client in (slow, blocker, quick, after)] == [1, 1, 1, 1]
    assert sender.num_live == 0


class Responses:
    """Keeps what a request gets: text or the error's message, and whether it was the last."""

    def __init__(self) -> None:
        self.got: list[tuple[str, bool]] = []

    def send(self, response: fake_pb_utils.InferenceResponse, flags: int) -> None:
        if response.has_error():
            self.got.append((response.error().message(), flags == FINAL))
        else:
            tensors = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
            self.got.append((tensors["text_output"].item().decode(), flags == FINAL))

    def is_cancelled(self) -> bool:
        return False


def ended(*deltas: TokenDelta, stream: bool = True, echo: str = "", **changes: Any) -> tuple[Responses, list[str]]:
    """The responses that these deltas make, and the requests that were cancelled for want of them."""
    cancelled, client = list[str](), Responses()
    sender = ResponseSender(fake_pb_utils, cancel=cancelled.append, **changes)
    generate = GenerateRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(logprobs=0))
    sender.register("r", client, ParsedRequest(generate=generate, stream=stream, return_token_ids=False), echo)
    for delta in deltas:
        sender.put(delta)
    sender.close(PATIENCE_S)
    return client, cancelled


def delta(text: str, **changes: Any) -> TokenDelta:
    return TokenDelta(request_id="r", token_ids=(1,), text=text, **changes)


LAST = FinishReason.LENGTH


def test_the_first_response_begins_with_the_echo() -> None:
    one = ended(delta("a", finish_reason=LAST), echo="def ")[0]
    assert one.got == [("def a", True)]


@pytest.mark.parametrize(
    ("cause", "reason", "message"),
    [
        (EndCause.NO_TOKEN_LEFT, FinishReason.ERROR, "INVALID_ARG: oops"),
        (EndCause.BAD_GRAMMAR, FinishReason.ERROR, "INVALID_ARG: oops"),
        (None, FinishReason.ERROR, "INTERNAL: oops"),
        (EndCause.SHUTDOWN, FinishReason.CANCELLED, "CANCELLED: oops"),
    ],
)
def test_a_failure_is_the_last_response(cause: EndCause | None, reason: FinishReason, message: str) -> None:
    end = delta("a", finish_reason=reason, cause=cause, error="oops")
    assert ended(end)[0].got == [("a", False), (message, True)]
    assert ended(end, stream=False)[0].got == [(message, True)]
    assert ended(replace(end, token_ids=()))[0].got == [(message, True)]


def test_a_clients_own_cancellation_is_a_normal_end() -> None:
    assert ended(delta("a", finish_reason=FinishReason.CANCELLED))[0].got == [("a", True)]


def test_a_response_that_cannot_be_built_ends_its_request(caplog: pytest.LogCaptureFixture) -> None:
    def fail(token_id: int) -> str:
        raise ZeroDivisionError

    broken = delta("a", logprobs=(TokenLogprobs(token_id=1, logprob=-1.0),))
    client, cancelled = ended(broken, token_text=fail)
    assert cancelled == ["r"]
    assert len(client.got) == 1
    assert client.got[0][1] and client.got[0][0].startswith("INTERNAL: internal error (ZeroDivisionError)")


def test_what_waits_has_an_age(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([50.0, 60.0])
    monkeypatch.setattr(response_sender, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    sender = types.SimpleNamespace(_changed=threading.Condition(), _ready={"a": None, "b": None, "gone": None})
    sender._live = {
        name: types.SimpleNamespace(pending_since_s=since) for name, since in {"a": 44.0, "b": 41.5}.items()
    }
    assert ResponseSender.lag_s.fget(sender) == 8.5  # type: ignore[attr-defined]
    sender._ready.clear()
    assert ResponseSender.lag_s.fget(sender) == 0.0  # type: ignore[attr-defined]
