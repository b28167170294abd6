"""Wrong requests get a code and a message that names the field; requests in flight beside them notice nothing."""

import numpy as np
import pytest

from kimi_client import InvalidRequest, KimiClient
from support.raw_streams import RawStream, raw_input
from support.server_process import MAX_MODEL_LEN


def strings(name, *values):
    """An input that the test makes: some are large, and every process collects all."""
    return lambda: raw_input(name, np.array([values], dtype=np.object_), "BYTES")


def ints(name, *values):
    return lambda: raw_input(name, np.array([values], np.int32), "INT32")


def floats(name, *values):
    return lambda: raw_input(name, np.array([values], np.float32), "FP32")


def of_shape(name, datatype, shape):
    dtype = {"INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_, "INT64": np.int64}[datatype]
    return lambda: raw_input(name, np.ones(shape, dtype), datatype)


PROMPT = [strings("text_input", "hi")]


BAD = [
    # prompts
    ("no prompt", [ints("max_tokens", 3)], {}, "prompt"),
    ("two prompts", [*PROMPT, ints("input_ids", 1)], {}, "prompt"),
    ("three prompts", [*PROMPT, ints("input_ids", 1), strings("messages", "[]")], {}, "prompt"),
    ("empty text", [strings("text_input", "")], {}, "text_input"),
    ("text not UTF-8", [strings("text_input", b"\xff")], {}, "text_input"),
    ("two texts", [strings("text_input", "a", "b")], {}, "text_input"),
    ("id below the vocabulary", [ints("input_ids", -1)], {}, "prompt"),
    ("id above the vocabulary", [ints("input_ids", 10**6)], {}, "prompt"),
    ("prompt too long", [ints("input_ids", *[1] * (MAX_MODEL_LEN + 1))], {}, "prompt"),
    ("messages not JSON", [strings("messages", "[")], {}, "messages"),
    ("messages empty", [strings("messages", "[]")], {}, "messages"),
    ("messages an object", [strings("messages", "{}")], {}, "messages"),
    ("message without a role", [strings("messages", '[{"content": "x"}]')], {}, "messages[0]"),
    ("message with a bad role", [strings("messages", '[{"role": 3, "content": "x"}]')], {}, "messages[0]"),
    ("message with a number", [strings("messages", '[{"role": "user", "content": 3}]')], {}, "messages[0]"),
    (
        "message with an image",
        [strings("messages", '[{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]')],
        {},
        "messages[0]",
    ),
    ("tools without messages", [*PROMPT, strings("tools", "[]")], {}, "tools"),
    ("template arguments not JSON", [strings("messages", "[]"), strings("chat_template_kwargs", "{")], {}, "chat_"),
    # numbers out of range
    ("max_tokens negative", [*PROMPT, ints("max_tokens", -5)], {}, "max_tokens"),
    ("min_tokens negative", [*PROMPT, ints("min_tokens", -1)], {}, "min_tokens"),
    ("min over max", [*PROMPT, ints("min_tokens", 9), ints("max_tokens", 3)], {}, "min_tokens"),
    ("temperature negative", [*PROMPT, floats("temperature", -1)], {}, "temperature"),
    ("temperature NaN", [*PROMPT, floats("temperature", np.nan)], {}, "temperature"),
    ("temperature infinite", [*PROMPT, floats("temperature", np.inf)], {}, "temperature"),
    ("top_p 0", [*PROMPT, floats("top_p", 0)], {}, "top_p"),
    ("top_p above 1", [*PROMPT, floats("top_p", 1.5)], {}, "top_p"),
    ("top_k -2", [*PROMPT, ints("top_k", -2)], {}, "top_k"),
    ("min_p negative", [*PROMPT, floats("min_p", -0.1)], {}, "min_p"),
    ("min_p above 1", [*PROMPT, floats("min_p", 1.1)], {}, "min_p"),
    ("repetition_penalty 0", [*PROMPT, floats("repetition_penalty", 0)], {}, "repetition_penalty"),
    ("presence_penalty infinite", [*PROMPT, floats("presence_penalty", np.inf)], {}, "presence_penalty"),
    ("frequency_penalty NaN", [*PROMPT, floats("frequency_penalty", np.nan)], {}, "frequency_penalty"),
    ("allowed ids beyond", [*PROMPT, ints("allowed_token_ids", 10**6)], {}, "allowed_token_ids"),
    ("logprobs negative", [*PROMPT, ints("logprobs", -1)], {}, "logprobs"),
    ("logprobs too many", [*PROMPT, ints("logprobs", 10**6)], {}, "logprobs"),
    ("k negative", [*PROMPT, ints("num_speculative_tokens", -1)], {}, "num_speculative_tokens"),
    ("k 8", [*PROMPT, ints("num_speculative_tokens", 8)], {}, "num_speculative_tokens"),
    ("k alias 8", [*PROMPT, ints("num_draft_tokens", 8)], {}, "num_speculative_tokens"),
    ("deadline 0", [*PROMPT, floats("timeout_s", 0)], {}, "timeout_s"),
    ("deadline negative", [*PROMPT, floats("timeout_s", -1)], {}, "timeout_s"),
    ("stop id outside", [*PROMPT, ints("stop_token_ids", 10**6)], {}, "stop_token_ids"),
    ("stop empty", [*PROMPT, strings("stop", "")], {}, "stop"),
    ("bad words too many", [*PROMPT, strings("bad_words", *["w"] * 2000)], {}, "bad_words: 2000 elements"),
    ("bad words far too many", [*PROMPT, strings("bad_words", *["w"] * 100_000)], {}, "bad_words: 100000 elements"),
    ("JSON of too many values", [strings("messages", f"[{'[],' * 200_000}0]")], {}, "messages: more than 131072"),
    ("bad word blank", [*PROMPT, strings("bad_words", " ")], {}, "bad_words"),
    ("bias not JSON", [*PROMPT, strings("logit_bias", "{")], {}, "logit_bias"),
    ("bias a list", [*PROMPT, strings("logit_bias", "[]")], {}, "logit_bias"),
    ("bias of text", [*PROMPT, strings("logit_bias", '{"a": 1}')], {}, "logit_bias"),
    ("bias outside", [*PROMPT, strings("logit_bias", '{"1000000": 1}')], {}, "logit_bias"),
    ("bias NaN", [*PROMPT, strings("logit_bias", '{"1": NaN}')], {}, "logit_bias"),
    ("removed input", [*PROMPT, strings("draft_sampling", "auto")], {}, "draft_sampling"),
    ("removed parameter", PROMPT, {"draft_sampling": "auto"}, "draft_sampling"),
    # parameters
    ("unknown parameter", PROMPT, {"temprature": 1}, "temprature"),
    ("n", PROMPT, {"n": 2}, "n"),
    ("best_of", PROMPT, {"best_of": 2}, "best_of"),
    ("beam_width", PROMPT, {"beam_width": 2}, "beam_width"),
    ("echo", PROMPT, {"echo": 3}, "echo"),
    ("prompt_logprobs", PROMPT, {"prompt_logprobs": 21}, "prompt_logprobs"),
    ("number as text", PROMPT, {"temperature": "hot"}, "temperature"),
    ("bool as int", PROMPT, {"max_tokens": True}, "max_tokens"),
    ("given twice", [*PROMPT, ints("top_k", 3)], {"top_k": 2}, "top_k"),
    ("nested unknown", [*PROMPT, strings("sampling_parameters", '{"foo": 1}')], {}, "foo"),
    ("nested not JSON", [*PROMPT, strings("sampling_parameters", "{")], {}, "sampling_parameters"),
    ("nested name with a surrogate", [*PROMPT, strings("sampling_parameters", '{"\\ud800": 1}')], {}, "\\ud800"),
    ("salt with a surrogate", [*PROMPT, strings("sampling_parameters", '{"cache_salt": "\\ud800"}')], {}, "cache_salt"),
    ("number beyond floats", [*PROMPT, strings("sampling_parameters", f'{{"min_p": 1{"0" * 400}}}')], {}, "min_p"),
    ("bias key of many digits", [*PROMPT, strings("logit_bias", f'{{"{"1" * 5000}": 1}}')], {}, "logit_bias"),
    ("repetition_penalty 1e-38", [*PROMPT, floats("repetition_penalty", 1e-38)], {}, "repetition_penalty"),
    (
        "no token left",
        [*PROMPT, ints("stop_token_ids", 5), ints("allowed_token_ids", 5), ints("min_tokens", 1)],
        {},
        "al",
    ),
    ("prompt in the output", PROMPT, {"exclude_input_in_output": False}, "exclude_input_in_output"),
    # the server's own refusals
    ("wrong datatype", [*PROMPT, of_shape("max_tokens", "INT64", (1, 1))], {}, "max_tokens"),
    ("no batch dimension", [*PROMPT, of_shape("max_tokens", "INT32", (1,))], {}, "max_tokens"),
    ("batch of two", [strings("text_input"), of_shape("max_tokens", "INT32", (2, 1))], {}, ""),
    ("unknown input", [*PROMPT, of_shape("max_token", "INT32", (1, 1))], {}, "max_token"),
]


@pytest.fixture(scope="module")
def neighbour(url):
    """A request in flight during every case of this module; what it says must not depend on them."""
    fields = {"text_input": "neighbour", "max_tokens": MAX_MODEL_LEN - 32, "ignore_eos": True, "seed": 9}
    client = KimiClient(url)
    running = client.stream(**fields)
    yield
    assert running.result().text == client.generate(**fields).text


@pytest.mark.parametrize(("inputs", "parameters", "field"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_each_bad_request_is_told_what_is_wrong(url, neighbour, inputs, parameters, field):
    stream = RawStream(url)
    stream.send("bad", [make() for make in inputs], parameters)
    results, errors = stream.until_final(1)
    stream.close()
    assert not results
    (error,) = errors
    assert field in error.message(), error.message()
    for sign in ("Traceback", 'File "', "TritonModelException", "INTERNAL", "At:"):
        assert sign not in error.message()


def test_there_are_at_least_60_kinds():
    assert len({b[0] for b in BAD}) >= 60


def test_the_client_knows_a_bad_request(url):
    with pytest.raises(InvalidRequest, match="top_p"):
        KimiClient(url).generate(text_input="hi", top_p=2.0)
