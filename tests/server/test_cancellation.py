"""A request that nobody waits for ends within a step and gives its blocks back."""

import asyncio
import http.client
import json

import numpy as np
import pytest

from kimi_client import InvalidRequest, KimiClient, RequestCancelled, RequestTimedOut
from kimi_client.aio import AsyncKimiClient
from support.raw_streams import RawStream, raw_input, text_input
from support.server_process import MAX_MODEL_LEN, assert_everything_is_free, cut_short
from support.waiting import PATIENCE_S

LONG = {"max_tokens": MAX_MODEL_LEN - 16, "ignore_eos": True, "seed": 1}
pytestmark = pytest.mark.usefixtures("slow_steps")


@pytest.fixture
def client(url):
    return KimiClient(url)


def test_leaving_a_stream_ends_its_request(client, server):
    with cut_short(server, 24 * LONG["max_tokens"]):
        streams = [client.stream(text_input=f"tell {i}", **LONG) for i in range(24)]
        for stream in streams:
            next(iter(stream))
        for stream in streams:
            stream.cancel()


def test_stop_stream_with_cancel_ends_all_of_a_streams_requests(client, url, server):
    inputs = [
        text_input("tell"),
        raw_input("stream", np.array([[True]]), "BOOL"),
        raw_input("max_tokens", np.array([[LONG["max_tokens"]]], np.int32), "INT32"),
        raw_input("ignore_eos", np.array([[True]]), "BOOL"),
    ]
    with cut_short(server, 8 * LONG["max_tokens"]):
        stream = RawStream(url)
        for i in range(8):
            stream.send(f"c{i}", inputs)
        stream.next()
        stream.close(cancel=True)


def test_dropping_an_http_stream_ends_its_request(client, server):
    connection = http.client.HTTPConnection("127.0.0.1", server.ports.http, timeout=PATIENCE_S)
    body = json.dumps({"text_input": "tell", "stream": True, **LONG})
    with cut_short(server, LONG["max_tokens"]):
        connection.request("POST", "/v2/models/spec_ensemble/generate_stream", body)
        connection.getresponse().read(64)
        connection.close()


def test_a_deadline_ends_a_request_with_what_it_has(client, server):
    completion = client.stream(text_input="tell", timeout_s=0.2, **LONG).result()
    assert completion.finish_reason == "cancelled"
    assert "deadline" in completion.stop_reason
    assert_everything_is_free(server)


def test_the_asyncio_client_cancels_and_times_out(client, url, server):
    async def scenario():
        async with AsyncKimiClient(url) as connected:
            assert await connected.is_ready()
            stream = connected.stream(text_input="tell", **LONG)
            async for _ in stream:
                stream.cancel()
            with pytest.raises(RequestCancelled):
                await stream.result()
            with pytest.raises(RequestTimedOut, match=r"after 0\.3 s"):
                await connected.generate(text_input="tell", timeout_s=0.3, **LONG)
            with pytest.raises(InvalidRequest, match="top_p"):
                await connected.generate(text_input="tell", top_p=3.0)
            done = await connected.generate(text_input="tell", max_tokens=4, seed=1)
            assert done.num_output_tokens == 4

    asyncio.run(scenario())
    assert_everything_is_free(server)
