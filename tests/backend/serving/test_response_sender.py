"""Each request gets all of its text and one final response, whenever its deltas come."""

import threading
import types
from collections.abc import Callable

import pytest

from kimi_backend.serving.request_parser import ParsedRequest
from kimi_backend.serving.response_sender import ResponseSender
from kimi_backend.types.request import FinishReason, GenerateRequest, SamplingParams, TokenDelta
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
