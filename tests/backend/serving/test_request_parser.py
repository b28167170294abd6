"""The request surface: what every field becomes, and what each wrong value is told."""

import json
import math
from typing import ClassVar

import numpy as np
import pytest

from kimi_backend.errors import InvalidRequestError
from kimi_backend.serving.request_fields import ELSEWHERE, INPUT_FIELDS, Kind
from kimi_backend.serving.request_parser import RequestParser
from kimi_backend.types.request import ThinkingBudget


class CharacterTokenizer:
    """One id a character: enough to see what was encoded."""

    longest_token_bytes: int | None = 4
    control_tokens: ClassVar = {"<think>": 1001, "</think>": 1002, "<|im_end|>": 1003}

    def encode(self, text, allow_special=False, enough=math.inf):
        assert not allow_special, "client text must never become control tokens"
        return [ord(c) for c in text][: enough + 1 if enough < math.inf else None]


def encode_chat(messages, *, tools, template_kwargs, enough):
    if not isinstance(messages, list):
        raise InvalidRequestError(f"messages: {messages!r} given, a list is allowed")
    return [len(messages), len(tools or []), len(template_kwargs)]


@pytest.fixture
def parser():
    return RequestParser(CharacterTokenizer(), encode_chat, default_max_tokens=0)


def strings(*values):
    return np.array([[v.encode() if isinstance(v, str) else v for v in values]], dtype=np.object_)


def as_tensor(kind, value):
    if kind in (Kind.TEXT, Kind.TEXTS, Kind.JSON):
        return strings(*value) if isinstance(value, list) else strings(value)
    dtype = {
        Kind.INT: np.int32,
        Kind.INTS: np.int32,
        Kind.UINT64: np.uint64,
        Kind.FLOAT: np.float32,
        Kind.BOOL: np.bool_,
    }[kind]
    return np.array(value, dtype=dtype).reshape(1, -1)


GOOD = {
    "max_tokens": (17, lambda r: r.sampling.max_tokens),
    "min_tokens": (3, lambda r: r.sampling.min_tokens),
    "temperature": (0.5, lambda r: r.sampling.temperature),
    "top_k": (9, lambda r: r.sampling.top_k),
    "top_p": (0.25, lambda r: r.sampling.top_p),
    "min_p": (0.125, lambda r: r.sampling.min_p),
    "seed": (2**64 - 1, lambda r: r.sampling.seed),
    "repetition_penalty": (1.5, lambda r: r.sampling.repetition_penalty),
    "presence_penalty": (0.5, lambda r: r.sampling.presence_penalty),
    "frequency_penalty": (0.5, lambda r: r.sampling.frequency_penalty),
    "stop_token_ids": ([4, 5], lambda r: list(r.sampling.stop_token_ids)),
    "stop": (["a", "b"], lambda r: list(r.sampling.stop)),
    "allowed_token_ids": ([4, 5], lambda r: list(r.sampling.allowed_token_ids)),
    "skip_special_tokens": (False, lambda r: r.sampling.skip_special_tokens),
    "ignore_eos": (True, lambda r: r.sampling.ignore_eos),
    "include_stop_str_in_output": (True, lambda r: r.sampling.include_stop_in_output),
    "logprobs": (2, lambda r: r.sampling.logprobs),
    "num_speculative_tokens": (5, lambda r: r.num_speculative_tokens),
    "proposer": ("lookup+eagle3", lambda r: r.proposer.value),
    "priority": (-2, lambda r: r.priority),
    "timeout_s": (1.5, lambda r: r.timeout_s),
    "cache_salt": ("s", lambda r: r.cache_salt),
}


@pytest.mark.parametrize("name", list(GOOD))
@pytest.mark.parametrize("place", ["tensor", "parameter", "sampling_parameters"])
def test_each_field_arrives_from_each_place(parser, name, place):
    import json

    value, read = GOOD[name]
    kind = next(f.kind for f in INPUT_FIELDS if f.name == name)
    tensors = {"text_input": strings("hi")}
    parameters = {}
    if place == "tensor":
        tensors[name] = as_tensor(kind, value)
    elif place == "parameter":
        parameters[name] = value
    else:
        tensors["sampling_parameters"] = strings(json.dumps({name: value}))
    assert read(parser.parse("r", tensors, parameters).generate) == value


def test_defaults(parser):
    parsed = parser.parse("r7", {"text_input": strings("hi")}, {})
    request = parsed.generate
    assert request.request_id == "r7"
    assert request.prompt_token_ids == (ord("h"), ord("i"))
    assert (parsed.stream, parsed.return_token_ids) == (False, False)
    assert request.num_speculative_tokens is None
    assert request.proposer is None
    assert request.sampling.max_tokens is None


def test_prompts_of_all_three_kinds(parser):
    assert parser.parse("r", {"input_ids": np.array([[7, 8]], np.int32)}, {}).generate.prompt_token_ids == (7, 8)
    chat = {"messages": strings('[{"role": "user", "content": "x"}]'), "tools": strings("[1, 2]")}
    assert parser.parse("r", chat, {"chat_template_kwargs": '{"thinking": false}'}).generate.prompt_token_ids == (
        1,
        2,
        1,
    )


def test_aliases_and_ignored_parameters(parser):
    tensors = {"text_input": strings("hi"), "stop_words": strings("x"), "num_draft_tokens": np.array([[2]], np.int32)}
    parameters = {"triton_enable_empty_final_response": True, "sequence_id": 3, "min_length": 4, "n": 1}
    request = parser.parse("r", tensors, parameters).generate
    assert request.sampling.stop == ("x",)
    assert request.num_speculative_tokens == 2
    assert request.sampling.min_tokens == 4


def test_bad_words_are_banned_with_and_without_a_space(parser):
    request = parser.parse("r", {"text_input": strings("hi"), "bad_words": strings("no")}, {}).generate
    assert set(request.sampling.bad_words) == {(ord("n"), ord("o")), (ord(" "), ord("n"), ord("o"))}


def test_top_k_of_minus_one_keeps_all(parser):
    assert parser.parse("r", {"text_input": strings("hi")}, {"top_k": -1}).generate.sampling.top_k == 0


PROMPT = {"text_input": strings("hi")}
BAD = [
    ("no prompt", {}, {}, "prompt: exactly one of"),
    ("two prompts", {**PROMPT, "input_ids": np.array([[1]], np.int32)}, {}, "text_input and input_ids were given"),
    ("empty text", {"text_input": strings("")}, {}, "text_input: empty"),
    ("empty ids", {"input_ids": np.zeros((1, 0), np.int32)}, {}, "input_ids: empty"),
    ("text not UTF-8", {"text_input": strings(b"\xff\xfe")}, {}, "text_input: not valid UTF-8"),
    ("two texts", {"text_input": strings("a", "b")}, {}, "text_input: 2 elements given"),
    ("messages not JSON", {"messages": strings("[")}, {}, "messages: not valid JSON"),
    ("messages too deep", {"messages": strings("[" * 100_000)}, {}, "messages: not valid JSON"),
    ("messages not a list", {"messages": strings("{}")}, {}, "messages: {} given"),
    ("tools without messages", {**PROMPT, "tools": strings("[]")}, {}, "tools: goes with messages only"),
    ("kwargs without messages", PROMPT, {"chat_template_kwargs": "{}"}, "chat_template_kwargs: goes with messages"),
    ("kwargs a list", {"messages": strings("[]"), "chat_template_kwargs": strings("[1]")}, {}, "a JSON object"),
    ("unknown parameter", PROMPT, {"guided_json": "{}"}, "guided_json: unknown parameter; docs/protocol.md"),
    ("misspelt", PROMPT, {"temprature": 1.0}, "temprature: unknown parameter (is temperature meant?)"),
    ("named elsewhere", PROMPT, {"max_new_tokens": 1}, "max_new_tokens: unknown parameter (is max_tokens meant?)"),
    ("unknown nested", {**PROMPT, "sampling_parameters": strings('{"foo": 1}')}, {}, "foo: unknown sampling_param"),
    ("nested itself", {**PROMPT, "sampling_parameters": strings('{"sampling_parameters": {}}')}, {}, "hold itself"),
    ("nested a list", {**PROMPT, "sampling_parameters": strings("[]")}, {}, "sampling_parameters: [] given"),
    ("nested not JSON", {**PROMPT, "sampling_parameters": strings("{")}, {}, "sampling_parameters: not valid JSON"),
    ("given twice", {**PROMPT, "top_k": np.array([[1]], np.int32)}, {"top_k": 2}, "top_k: given twice"),
    ("alias given twice", {**PROMPT, "stop": strings("a")}, {"stop_words": "b"}, "stop: given twice"),
    ("n", PROMPT, {"n": 2}, "n: 2 given, only 1 is supported"),
    ("best_of", PROMPT, {"best_of": 3}, "best_of: 3 given"),
    ("beam_width", PROMPT, {"beam_width": 4}, "beam_width: 4 given"),
    ("use_beam_search", PROMPT, {"use_beam_search": True}, "use_beam_search: True given"),
    ("echo", PROMPT, {"echo": 1}, "echo: 1 given, true or false"),
    ("prompt_logprobs", PROMPT, {"prompt_logprobs": True}, "prompt_logprobs: True given, an integer"),
    ("lora", PROMPT, {"lora_name": "x"}, "lora_name: 'x' given"),
    ("number as text", PROMPT, {"temperature": "hot"}, "temperature: 'hot' given, a number"),
    ("NaN", PROMPT, {"top_p": float("nan")}, "top_p: nan given"),
    ("bool as int", PROMPT, {"max_tokens": True}, "max_tokens: True given, an integer"),
    ("float as int", PROMPT, {"max_tokens": 1.5}, "max_tokens: 1.5 given, an integer"),
    ("int as bool", PROMPT, {"ignore_eos": 1}, "ignore_eos: 1 given, true or false"),
    ("int as text", PROMPT, {"cache_salt": 3}, "cache_salt: 3 given, a string"),
    ("negative seed", PROMPT, {"seed": -1}, "seed: -1 given"),
    ("seed too large", PROMPT, {"seed": 2**64}, "seed: "),
    ("stop of numbers", PROMPT, {"stop": [1]}, "stop: [1] given"),
    ("stop ids of text", PROMPT, {"stop_token_ids": ["a"]}, "stop_token_ids: ['a'] given"),
    ("stop ids a number", PROMPT, {"stop_token_ids": 3}, "stop_token_ids: 3 given"),
    ("draft_sampling", PROMPT, {"draft_sampling": "auto"}, "draft_sampling: this parameter was removed; leave it out"),
    ("proposer", PROMPT, {"proposer": "ngram"}, "proposer: 'ngram' given, one of none, eagle3, lookup, lookup+eagle3"),
    ("logit_bias a list", PROMPT, {"logit_bias": "[1]"}, "logit_bias: [1] given"),
    ("logit_bias key", PROMPT, {"logit_bias": '{"the": 1}'}, "logit_bias: 'the': 1 given"),
    ("logit_bias value", PROMPT, {"logit_bias": '{"3": "x"}'}, "logit_bias: '3': 'x' given"),
    ("logit_bias key of many digits", PROMPT, {"logit_bias": '{"%s": 1}' % ("1" * 5000)}, "logit_bias: '1111"),
    ("logit_bias key in other digits", PROMPT, {"logit_bias": '{"\u0663": 1}'}, "logit_bias: '\u0663': 1 given"),
    ("logit_bias key twice", PROMPT, {"logit_bias": '{"3": 1, "03": 2}'}, "logit_bias: '03': 2 given"),
    ("logit_bias beyond floats", PROMPT, {"logit_bias": '{"3": 1%s}' % ("0" * 400)}, "logit_bias: '3': 1000"),
    ("logit_bias NaN", PROMPT, {"logit_bias": '{"3": NaN}'}, "logit_bias: '3': nan given"),
    ("a number beyond floats", PROMPT, {"temperature": 10**400}, "temperature: 1000"),
    ("surrogate in a text", PROMPT, {"cache_salt": "a\ud800"}, "cache_salt: character 1 is the lone surrogate U+D800"),
    ("surrogate in texts", PROMPT, {"bad_words": ["a", "\ud800"]}, "bad_words[1]: character 0 is the lone surrogate"),
    ("surrogate in the prompt", {"sampling_parameters": strings('{"text_input": "\\ud800"}')}, {}, "text_input: char"),
    ("blank bad word", PROMPT, {"bad_words": [" "]}, "bad_words: ' ' given"),
    ("no token allowed", PROMPT, {"allowed_token_ids": []}, "allowed_token_ids: [] given"),
    ("no control token", PROMPT, {"stop_control_tokens": ["a"]}, "stop_control_tokens: 'a' given"),
    ("prompt in output", PROMPT, {"exclude_input_in_output": False}, "exclude_input_in_output: false given"),
]


@pytest.mark.parametrize(("tensors", "parameters", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_wrong_values_name_themselves(parser, tensors, parameters, message):
    with pytest.raises(InvalidRequestError) as caught:
        parser.parse("r", tensors, parameters)
    assert message in str(caught.value)


def test_without_a_chat_template_messages_are_refused():
    parser = RequestParser(CharacterTokenizer(), None, default_max_tokens=5)
    assert parser.parse("r", PROMPT, {}).generate.sampling.max_tokens == 5
    with pytest.raises(InvalidRequestError, match="no chat template"):
        parser.parse("r", {"messages": strings("[]")}, {})


@pytest.mark.parametrize(
    ("prompt", "begins_thinking"),
    [([5, 1001], True), ([1001, 5], True), ([1001, 1002], False), ([1001, 1002, 5, 1003], False), ([5], False)],
)
def test_the_prompt_says_whether_thoughts_come(parser, prompt, begins_thinking):
    ids = {"input_ids": np.array([prompt], dtype=np.int32)}
    assert parser.parse("r", ids, {}).begins_thinking is None
    assert parser.parse("r", ids, {"return_control_offsets": True}).begins_thinking is begins_thinking


def test_a_budget_of_thoughts_holds_where_the_prompt_thinks(parser):
    def parse(prompt, budget):
        ids = {"input_ids": np.array([prompt], dtype=np.int32)}
        return parser.parse("r", ids, {"thinking_token_budget": budget}).generate.sampling.thinking_budget

    assert parse([5, 1001], 0) == ThinkingBudget(0, 1002)
    assert parse([5, 1001, 1002], 7) is None
    with pytest.raises(InvalidRequestError, match="thinking_token_budget: -1 given, 0 or more"):
        parse([5, 1001], -1)


def test_a_grammar_begins_behind_the_thoughts_of_a_prompt_that_thinks(parser):
    for prompt, begins_after in (([5, 1001], 1002), ([5, 1001, 1002], None), ([5], None)):
        ids = {"input_ids": np.array([prompt], dtype=np.int32)}
        grammar = parser.parse("r", ids, {"structured_outputs": '{"regex": "a+"}'}).generate.sampling.grammar
        assert grammar is not None and grammar.begins_after == begins_after


def test_control_tokens_that_end_the_output(parser):
    parameters = {"stop_token_ids": [5], "stop_control_tokens": ["</think>"]}
    assert parser.parse("r", {"text_input": strings("a")}, parameters).generate.sampling.stop_token_ids == (5, 1002)


@pytest.mark.parametrize("value", [0.01, 0.1, 1.1, 0.3, 100.0, 1e-30, 3.0e38])
def test_a_number_is_what_was_sent_and_not_what_float32_made_of_it(parser, value):
    tensors = {"text_input": strings("a"), "repetition_penalty": np.array([[value]], dtype=np.float32)}
    assert parser.parse("r", tensors, {}).generate.sampling.repetition_penalty == value


@pytest.mark.parametrize("fields", [{"temperature": "x" * 10_000}, {"x" * 10_000: 1}])
def test_what_is_long_is_shortened_in_the_message(parser, fields):
    for parameters in (fields, {"sampling_parameters": json.dumps(fields)}):
        with pytest.raises(InvalidRequestError) as caught:
            parser.parse("r", PROMPT, parameters)
        assert len(str(caught.value)) < 300


def test_names_of_other_servers_are_no_fields_here_and_lead_to_fields():
    fields = {field.name for field in INPUT_FIELDS}
    assert not fields & ELSEWHERE.keys()
    assert fields >= set(ELSEWHERE.values())


def test_too_many_token_ids_are_refused_unread(parser):
    class Unread:
        size = 11

    with pytest.raises(InvalidRequestError, match=r"^prompt: 11 tokens given, at most 10 are allowed"):
        parser.parse("r", {"input_ids": Unread()}, {}, 10)


def test_a_chat_is_tokenised_no_further_than_it_may_be_long():
    parser = RequestParser(CharacterTokenizer(), lambda messages, *, enough, **_: [enough], default_max_tokens=0)
    parsed = parser.parse("r", {"messages": strings("[]")}, {}, max_prompt_tokens=10)
    assert parsed.generate.prompt_token_ids == (10,)


def test_a_text_of_too_many_tokens_is_refused_unread(parser, monkeypatch):
    def parse(num_chars, **limit):
        return parser.parse("r", {"text_input": strings("x" * num_chars)}, {}, **limit)

    with pytest.raises(InvalidRequestError, match=r"^prompt: 11 or more tokens given, at most 10 are allowed"):
        parse(40, max_prompt_tokens=10)  # it might have been ten
    assert len(parse(40, max_prompt_tokens=40).generate.prompt_token_ids) == 40
    assert len(parse(41).generate.prompt_token_ids) == 41
    with monkeypatch.context() as patch:
        patch.setattr(CharacterTokenizer, "encode", lambda *_, **__: pytest.fail("it was read"))
        with pytest.raises(
            InvalidRequestError, match="text_input: 41 characters given, which are more than the 10 tok"
        ):
            parse(41, max_prompt_tokens=10)
    monkeypatch.setattr(CharacterTokenizer, "longest_token_bytes", None)
    with pytest.raises(InvalidRequestError, match=r"^prompt: 11 or more tokens given"):
        parse(41, max_prompt_tokens=10)
