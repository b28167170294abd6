"""`spec_ensemble_unary`: tritonclient's `infer` over both protocols, blocking and on asyncio."""

import asyncio
import json
import re
import threading

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio
import tritonclient.http as httpclient
import tritonclient.http.aio as httpaio
from tritonclient.utils import InferenceServerException

import try_clients
from kimi_client import InvalidRequest, KimiClient, ServerUnreachable
from support.server_process import assert_everything_is_free, cut_short, wait_until_running
from support.waiting import PATIENCE_S

MODEL = "spec_ensemble_unary"
FIELDS = {"text_input": "def add(a, b):", "max_tokens": 12, "seed": 7, "temperature": 0.8}
TYPES = {
    "text_input": ("BYTES", np.object_),
    "sampling_parameters": ("BYTES", np.object_),
    "stream": ("BOOL", np.bool_),
    "max_tokens": ("INT32", np.int32),
    "seed": ("UINT64", np.uint64),
    "temperature": ("FP32", np.float32),
    "timeout_s": ("FP32", np.float32),
    "ignore_eos": ("BOOL", np.bool_),
}


def tensors(library, fields):
    made = []
    for name, value in fields.items():
        datatype, dtype = TYPES[name]
        tensor = library.InferInput(name, [1, 1], datatype)
        tensor.set_data_from_numpy(np.array([[value]], dtype=dtype))
        made.append(tensor)
    return made


@pytest.fixture(scope="module")
def http(server):
    with httpclient.InferenceServerClient(f"127.0.0.1:{server.ports.http}", concurrency=64) as client:
        yield client


@pytest.fixture(scope="module")
def grpc(url):
    with grpcclient.InferenceServerClient(url) as client:
        yield client


@pytest.fixture(scope="module")
def expected(url):
    with KimiClient(url) as client:
        return client.generate(**FIELDS).text


def text_of(result):
    return result.as_numpy("text_output").reshape(-1)[0].decode()


def on_asyncio(library, address):
    async def run():
        async with library.InferenceServerClient(address) as client:
            return await client.infer(MODEL, tensors(library, FIELDS))

    return asyncio.run(run())


@pytest.mark.parametrize("protocol", ["grpc", "http", "grpc.aio", "http.aio"])
def test_infer_gives_the_text_of_the_stream(server, url, http, grpc, expected, protocol):
    address = f"127.0.0.1:{server.ports.http}"
    result = {
        "grpc": lambda: grpc.infer(MODEL, tensors(grpcclient, FIELDS), request_id="mine"),
        "http": lambda: http.infer(MODEL, tensors(httpclient, FIELDS), request_id="mine"),
        "grpc.aio": lambda: on_asyncio(grpcaio, url),
        "http.aio": lambda: on_asyncio(httpaio, address),
    }[protocol]()
    assert text_of(result) == expected
    assert json.loads(result.as_numpy("statistics").reshape(-1)[0])["seed"] == 7
    assert result.as_numpy("finish_reason").reshape(-1)[0] == b"length"
    assert result.as_numpy("num_input_tokens").reshape(-1)[0] > 0


def test_parameters_and_requested_outputs_are_handed_on(http, grpc, expected):
    only_text = {key: value for key, value in FIELDS.items() if key == "text_input"}
    rest = {key: value for key, value in FIELDS.items() if key != "text_input"}
    for library, client in ((grpcclient, grpc), (httpclient, http)):
        outputs = [library.InferRequestedOutput("text_output")]
        result = client.infer(MODEL, tensors(library, only_text), outputs=outputs, parameters=rest)
        assert text_of(result) == expected
        assert result.as_numpy("statistics") is None


REFUSED = [
    ({**FIELDS, "stream": True}, {}, "stream: true given, this model answers once"),
    ({**FIELDS, "sampling_parameters": '{"stream": true}'}, {}, "stream: given twice"),
    ({**FIELDS, "temperature": -1}, {}, "temperature"),
    ({**FIELDS, "max_tokens": -1}, {}, "max_tokens"),
    (FIELDS, {"no_such_field": 1}, "no_such_field: unknown"),
    ({"text_input": "a", "sampling_parameters": "{}"}, {"temperature": 0.5}, "temperature: given beside"),
    ({"text_input": ""}, {}, "text_input: empty"),
]


@pytest.mark.parametrize(("fields", "parameters", "said"), REFUSED, ids=[row[2] for row in REFUSED])
def test_a_bad_request_is_refused_by_name(http, grpc, fields, parameters, said):
    for library, client, status in ((grpcclient, grpc, "INVALID_ARGUMENT"), (httpclient, http, "400")):
        with pytest.raises(InferenceServerException, match=said) as error:
            client.infer(MODEL, tensors(library, fields), parameters=parameters)
        assert status in str(error.value.status())


def test_our_client_over_http(server, url):
    with KimiClient(f"localhost:{server.ports.http}", protocol="http") as client, KimiClient(url) as grpc_client:
        assert client.is_ready()
        ask = {"messages": [{"role": "user", "content": "hi"}], "seed": 2**63 + 5, "max_tokens": 9, "logprobs": 2}
        ask |= {"stop": ["never", "ever"], "return_token_ids": True}
        ours, expected = client.generate(**ask), grpc_client.generate(**ask)
        assert (ours.text, ours.token_ids, ours.logprobs) == (expected.text, expected.token_ids, expected.logprobs)
        assert ours.statistics["seed"] == 2**63 + 5
        with pytest.raises(InvalidRequest, match=r"^temperature"):
            client.generate(text_input="a", temperature=-1)
        with client.stream(text_input="a", max_tokens=5, timeout_s=PATIENCE_S) as stream:
            assert len(list(stream)) == 1
    with KimiClient("localhost:1", protocol="http") as nobody:
        assert not nobody.is_ready()
        with pytest.raises(ServerUnreachable):
            nobody.generate(text_input="a")
    with pytest.raises(InvalidRequest, match=r"^protocol"):
        KimiClient(protocol="udp")


@pytest.mark.parametrize("run", [try_clients.by_tritonclient, try_clients.by_tritonclient_aio])
def test_a_stream_is_what_other_peoples_clients_count(url, tmp_path, run):
    """The rows of docs/clients.md that need nothing but tritonclient."""
    said = run(try_clients.Addresses(grpc=url, openai="", work=tmp_path))
    num_tokens, num_responses = map(int, re.fullmatch(r"(\d+) tokens in (\d+) responses", said).groups())
    assert num_tokens == 24
    assert 2 < num_responses <= 26


def test_64_at_once_are_each_answered_once(server, grpc, http, expected):
    """More than the 32 threads that the server has for calls between models."""
    results = {}

    def run(i):
        library, client = ((grpcclient, grpc), (httpclient, http))[i % 2]
        results[i] = client.infer(MODEL, tensors(library, {**FIELDS, "seed": 7 + i % 4}))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(0, 128, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(results) == 64
    assert {text_of(results[i]) for i in range(0, 128, 4)} == {expected}
    assert_everything_is_free(server)


def test_a_client_that_leaves_is_bounded_by_its_timeout(server, slow_steps, grpc):
    fields = {"text_input": "a", "max_tokens": 480, "timeout_s": 3.0, "ignore_eos": True}
    with cut_short(server, fields["max_tokens"]):
        call = grpc.async_infer(MODEL, tensors(grpcclient, fields), callback=lambda result, error: None)
        wait_until_running(server, 1)
        call.cancel()
