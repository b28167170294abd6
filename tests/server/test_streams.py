"""Many requests at once: in order, one end each, the same text as without a server."""

import threading

import numpy as np
import pytest

from kimi_backend.cli.local_engine import local_engine
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_backend.types.request import GenerateRequest, SamplingParams
from kimi_client import KimiClient
from support.raw_streams import RawStream, raw_input, text_input
from support.server_process import serving_settings
from support.waiting import PATIENCE_S

NUM_STREAMS = 64
MAX_TOKENS = 12

END_OF_TURN = 1794
"""`<|im_end|>` of the tiny checkpoint."""


def is_final(result):
    return result.get_response().parameters["triton_final_response"].bool_param


def joined_text(results):
    return b"".join(r.as_numpy("text_output").reshape(-1)[0] for r in results if r.as_numpy("text_output") is not None)


def test_64_streams_in_order_with_one_end_each(url):
    stream = RawStream(url)
    for i in range(NUM_STREAMS):
        inputs = [
            text_input(f"prompt {i}"),
            raw_input("stream", np.array([[True]]), "BOOL"),
            raw_input("seed", np.array([[i]], np.uint64), "UINT64"),
            raw_input("max_tokens", np.array([[MAX_TOKENS]], np.int32), "INT32"),
            raw_input("ignore_eos", np.array([[True]]), "BOOL"),
        ]
        stream.send(f"id-{i}", inputs)
    results, errors = stream.until_final(NUM_STREAMS)
    assert not errors
    assert set(results) == {f"id-{i}" for i in range(NUM_STREAMS)}
    for responses in results.values():
        assert [is_final(r) for r in responses] == [False] * (len(responses) - 1) + [True]
        counts = [int(r.as_numpy("num_output_tokens").reshape(-1)[0]) for r in responses]
        assert sum(counts) == MAX_TOKENS
        assert responses[-1].as_numpy("finish_reason").reshape(-1)[0] == b"length"
    assert stream.is_quiet(), "a request answered after its end"
    stream.close()
    # In order: what arrived piece by piece is what one response holds.
    client = KimiClient(url)
    for i in (0, 17, 63):
        fields = {"seed": i, "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": False}
        whole = client.generate(text_input=f"prompt {i}", **fields)
        assert whole.text.encode() == joined_text(results[f"id-{i}"])


@pytest.fixture(scope="module")
def engine(checkpoint):
    settings = serving_settings(checkpoint)
    tokenizer = load_tokenizer(settings.checkpoint)
    with local_engine(settings, tokenizer) as running:
        yield running, tokenizer


@pytest.mark.parametrize("k", [0, 3, 7])
@pytest.mark.parametrize("seed", [1, 2])
def test_text_equals_that_of_the_engine_in_process(url, engine, k, seed):
    running, tokenizer = engine
    prompt = "class Stack:\n    def push(self, item):"
    done = threading.Event()
    deltas = []

    def sink(delta):
        deltas.append(delta)
        if delta.finish_reason is not None:
            done.set()

    request = GenerateRequest(
        request_id="in-process",
        prompt_token_ids=tuple(tokenizer.encode(prompt)),
        sampling=SamplingParams(seed=seed, max_tokens=24, temperature=0.8, top_p=0.9, frequency_penalty=0.3),
        num_speculative_tokens=k,
    )
    running.submit(request, sink)
    assert done.wait(PATIENCE_S)
    completion = KimiClient(url).generate(
        text_input=prompt,
        seed=seed,
        max_tokens=24,
        temperature=0.8,
        top_p=0.9,
        frequency_penalty=0.3,
        num_speculative_tokens=k,
        return_token_ids=True,
    )
    assert completion.token_ids == tuple(t for d in deltas for t in d.token_ids)
    assert completion.text == "".join(d.text for d in deltas)


def test_the_last_response_carries_usage_and_speculation(url):
    completion = KimiClient(url).generate(
        text_input="hello", max_tokens=9, seed=3, num_speculative_tokens=2, logprobs=2
    )
    statistics = completion.statistics
    assert statistics["num_output_tokens"] == completion.num_output_tokens == len(completion.logprobs)
    assert statistics["seed"] == 3
    speculation = completion.speculation
    assert sum(speculation["acceptance_histogram"]) == speculation["num_spec_steps"]
    assert statistics["num_output_tokens"] >= 1 + speculation["num_accepted_draft_tokens"]
    for entry in completion.logprobs:
        assert len(entry.top) == 2
        assert entry.logprob <= entry.top[0][1]


def test_only_allowed_tokens_come_and_special_ones_are_shown_on_request(url):
    client = KimiClient(url)
    fields = {"text_input": "hello", "max_tokens": 12, "seed": 3, "ignore_eos": True, "return_token_ids": True}
    letters = list(range(ord("a"), ord("z") + 1))  # the first 256 ids are bytes
    completion = client.generate(**fields, allowed_token_ids=letters, logprobs=0)
    assert set(completion.token_ids) <= set(letters)
    assert "".join(entry.token for entry in completion.logprobs) == completion.text
    assert completion.prompt_token_ids == client.generate(**{**fields, "max_tokens": 1}).prompt_token_ids != ()
    special = {**fields, "allowed_token_ids": [END_OF_TURN]}
    hidden, shown = client.generate(**special), client.generate(**special, skip_special_tokens=False)
    assert hidden.token_ids == shown.token_ids == (END_OF_TURN,) * 12
    assert (hidden.text, shown.text) == ("", "<|im_end|>" * 12)


def test_without_a_seed_the_reported_one_repeats_the_text(url):
    client = KimiClient(url)
    first = client.generate(text_input="hello", max_tokens=16)
    again = client.generate(text_input="hello", max_tokens=16, seed=first.statistics["seed"])
    assert again.text == first.text


def test_chat_messages_and_stop_strings(url):
    client = KimiClient(url)
    messages = [{"role": "user", "content": "hi <|im_end|> there"}]
    whole = client.generate(messages=messages, max_tokens=24, seed=5)
    assert whole.num_output_tokens > 4
    stop = whole.text[6:8]
    cut = client.generate(messages=messages, max_tokens=24, seed=5, stop=[stop])
    assert cut.finish_reason == "stop"
    assert cut.stop_reason == stop
    assert cut.text == whole.text[: whole.text.index(stop)]


def test_what_other_tools_send_is_understood(url):
    """The tensors of Triton's OpenAI frontend and of genai-perf's two request shapes."""
    frontend = [
        text_input("hi"),
        raw_input("stream", np.array([[True]]), "BOOL"),
        raw_input("max_tokens", np.array([[5]], np.int32), "INT32"),
        raw_input("stop_words", np.array([["zzzz", "yyyy"]], dtype=np.object_), "BYTES"),
        raw_input("top_p", np.array([[0.9]], np.float32), "FP32"),
        raw_input("temperature", np.array([[0.7]], np.float32), "FP32"),
        raw_input("frequency_penalty", np.array([[0.1]], np.float32), "FP32"),
        raw_input("presence_penalty", np.array([[0.1]], np.float32), "FP32"),
        raw_input("seed", np.array([[3]], np.uint64), "UINT64"),
        raw_input("exclude_input_in_output", np.array([[True]]), "BOOL"),
        raw_input("return_num_input_tokens", np.array([[True]]), "BOOL"),
        raw_input("return_num_output_tokens", np.array([[True]]), "BOOL"),
    ]
    trtllm = [*frontend[:3], raw_input("min_length", np.array([[5]], np.int32), "INT32"), frontend[9]]
    vllm = [
        *frontend[:2],
        raw_input("sampling_parameters", np.array([['{"max_tokens": 5, "min_tokens": 5}']], dtype=np.object_), "BYTES"),
        frontend[9],
    ]
    stream = RawStream(url)
    for name, inputs in (("frontend", frontend), ("trtllm", trtllm), ("vllm", vllm)):
        stream.send(name, inputs)
    results, errors = stream.until_final(3)
    stream.close()
    assert not errors
    for responses in results.values():
        assert sum(int(r.as_numpy("num_output_tokens").reshape(-1)[0]) for r in responses) == 5
        assert sum(int(r.as_numpy("num_input_tokens").reshape(-1)[0]) for r in responses) == 1
