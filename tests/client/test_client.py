"""Both clients over a transport that a test scripts: no server, no network."""

import asyncio
import json

import grpc
import grpc.aio
import numpy as np
import pytest
from tritonclient.grpc import service_pb2
from tritonclient.utils import serialize_byte_tensor

from kimi_client import (
    InvalidRequest,
    KimiClient,
    RequestCancelled,
    RequestTimedOut,
    ServerBusy,
    ServerFailed,
    ServerUnreachable,
)
from kimi_client._transport import DEADLINE_GRACE_S
from kimi_client.aio import AsyncKimiClient


def message(text="", count=1, finish="", statistics=None, *, final=False):
    """One response of `spec_ensemble`, as it travels."""
    reply = service_pb2.ModelStreamInferResponse()
    values = {"text_output": text, "finish_reason": finish, "statistics": json.dumps(statistics) if statistics else ""}
    for name, value in values.items():
        reply.infer_response.outputs.add(name=name, datatype="BYTES", shape=[1, 1])
        tensor = serialize_byte_tensor(np.array([[value.encode()]], dtype=np.object_))
        reply.infer_response.raw_output_contents.append(tensor.item())
    reply.infer_response.outputs.add(name="num_output_tokens", datatype="UINT32", shape=[1, 1])
    reply.infer_response.raw_output_contents.append(np.array([count], np.uint32).tobytes())
    reply.infer_response.parameters["triton_final_response"].bool_param = final
    return reply


def failure(text):
    return service_pb2.ModelStreamInferResponse(error_message=text)


class RpcFailure(grpc.RpcError):
    def __init__(self, status, details):
        self.code, self.details = lambda: status, lambda: details


class Call:
    def __init__(self, replies):
        self.replies, self.is_cancelled, self.is_at_end = iter(replies), False, False
        Call.latest = self

    def __next__(self):
        try:
            reply = next(self.replies)
        except StopIteration:
            self.is_at_end = True
            raise
        if isinstance(reply, Exception):
            raise reply
        return reply

    def cancel(self):
        self.is_cancelled = True


class AsyncCall(Call):
    async def read(self):
        try:
            return next(self)
        except StopIteration:
            return grpc.aio.EOF


class Transport:
    """Answers every request with the same replies, or the first ones with `refusals` of one message each."""

    call_class = Call

    def __init__(self, *replies, refusals=()):
        self.replies, self.requests, self.calls = replies, [], []
        self.refusals, self.num_reconnects = list(refusals), 0

    def reconnect(self):
        self.num_reconnects += 1

    def is_ready(self):
        return True

    def stream(self, request, timeout_s, metadata=()):
        self.metadata = metadata
        self.requests.append((request, timeout_s))
        self.calls.append(self.call_class([self.refusals.pop(0)] if self.refusals else self.replies))
        return self.calls[-1]

    def close(self):
        self.replies = None


class AsyncTransport(Transport):
    call_class = AsyncCall

    async def is_ready(self):
        return True

    async def close(self):
        self.replies = None


def blocking(*replies, timeout_s=None, refusals=(), max_retries=0, **fields):
    transport = Transport(*replies, refusals=refusals)
    with KimiClient(transport=transport, timeout_s=timeout_s, max_retries=max_retries) as client:
        assert client.is_ready()
        return client.generate(**fields), transport


def on_asyncio(*replies, timeout_s=None, refusals=(), max_retries=0, **fields):
    async def run():
        transport = AsyncTransport(*replies, refusals=refusals)
        async with AsyncKimiClient(transport=transport, timeout_s=timeout_s, max_retries=max_retries) as client:
            assert await client.is_ready()
            return await client.generate(**fields), transport

    return asyncio.run(run())


both = pytest.mark.parametrize("run", [blocking, on_asyncio])
ENDED = (message("def ", 2), message("f", 1, "stop", {"seed": 7}, final=True))


@both
def test_chunks_become_a_completion(run):
    completion, transport = run(*ENDED, text_input="x", max_tokens=3)
    assert (completion.text, completion.num_output_tokens) == ("def f", 3)
    assert (completion.finish_reason, completion.statistics) == ("stop", {"seed": 7})
    (request, timeout_s) = transport.requests[0]
    assert timeout_s is None
    assert [entry.name for entry in request.inputs] == ["stream", "text_input", "max_tokens"]
    assert transport.replies is None


@both
def test_a_time_limit_goes_to_the_server_and_holds_here(run):
    _, transport = run(*ENDED, timeout_s=3.0, text_input="x")
    request, timeout_s = transport.requests[0]
    assert timeout_s == 3.0 + DEADLINE_GRACE_S
    assert "timeout_s" in [entry.name for entry in request.inputs]
    with pytest.raises(RequestTimedOut, match="after 3 s with 2 tokens"):
        run(message("a", 2, "cancelled", {"seed": 1}, final=True), timeout_s=3.0, text_input="x")


REFUSALS = (
    failure("UNAVAILABLE: the server is shutting down"),
    failure("Request for unknown model: 'spec_ensemble' has no available versions"),
    RpcFailure(grpc.StatusCode.UNAVAILABLE, "Connection refused"),
)


@both
def test_a_refused_request_is_sent_again_over_a_new_connection(run, monkeypatch):
    monkeypatch.setattr("kimi_client._retries.FIRST_PAUSE_S", 1e-3)
    completion, transport = run(*ENDED, refusals=REFUSALS, max_retries=3, text_input="x")
    assert (completion.text, transport.num_reconnects) == ("def f", 3)
    assert len({request.id for request, _ in transport.requests}) == 1
    with pytest.raises(ServerUnreachable, match="Connection refused"):
        run(*ENDED, refusals=REFUSALS, max_retries=2, text_input="x")


@both
@pytest.mark.parametrize(
    "replies",
    [(message("a"), RpcFailure(grpc.StatusCode.UNAVAILABLE, "Socket closed")), (failure("INVALID_ARG: top_p"),)],
)
def test_what_has_begun_or_is_wrong_is_not_sent_again(run, replies):
    with pytest.raises((ServerUnreachable, InvalidRequest), match=r"Socket closed|top_p"):
        run(*replies, max_retries=9, text_input="x")


@both
@pytest.mark.parametrize(
    ("last", "error"),
    [
        (failure("INVALID_ARG: top_p: 2 given"), InvalidRequest),
        (failure("UNAVAILABLE: 9 requests are waiting"), ServerBusy),
        (failure("INTERNAL: oops"), ServerFailed),
        (RpcFailure(grpc.StatusCode.UNAVAILABLE, "Connection refused"), ServerUnreachable),
        (RpcFailure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"), RequestTimedOut),
    ],
)
def test_an_error_behind_a_chunk_ends_the_request(run, last, error):
    with pytest.raises(error):
        run(message("a"), last, message("never read"), text_input="x")


@both
def test_a_stream_that_ends_without_a_reason_is_no_completion(run):
    with pytest.raises(RequestCancelled):
        run(message("a"), text_input="x")


@both
def test_a_wrong_field_is_never_sent(run):
    with pytest.raises(InvalidRequest, match="temprature: unknown field"):
        run(*ENDED, temprature=1.0)


def test_leaving_a_stream_cancels_it_and_reading_it_to_its_end_does_not():
    transport = Transport(*ENDED)
    client = KimiClient(transport=transport)
    with client.stream(text_input="x") as stream:
        assert next(iter(stream)).text == "def "
    with client.stream(text_input="x") as stream:
        assert stream.result().text == "def f"
    assert [call.is_cancelled for call in transport.calls] == [True, False]


@both
def test_an_ended_stream_is_read_to_its_end_and_not_given_up(run):
    """Triton Server 24.10 would keep some of it."""
    run(*ENDED, text_input="x")
    assert Call.latest.is_at_end and not Call.latest.is_cancelled
    with pytest.raises(InvalidRequest):
        run(failure("INVALID_ARG: no"), text_input="x")
    assert Call.latest.is_at_end and not Call.latest.is_cancelled
    _, transport = run(*ENDED, refusals=[failure("UNAVAILABLE: full")], max_retries=1, text_input="x")
    assert [(call.is_at_end, call.is_cancelled) for call in transport.calls] == [(True, False)] * 2


def test_a_stream_on_asyncio_is_cancelled_where_it_is_left():
    async def run():
        transport = AsyncTransport(*ENDED)
        client = AsyncKimiClient(transport=transport)
        async with client.stream(text_input="x") as stream:
            async for _ in stream:
                break
        async with client.stream(text_input="x") as stream:
            assert (await stream.result()).text == "def f"
        return [call.is_cancelled for call in transport.calls]

    assert asyncio.run(run()) == [True, False]
