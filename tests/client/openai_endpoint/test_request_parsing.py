"""Whatever a body says, it becomes fields of the server or an error that names what is wrong."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_client import InvalidRequest
from kimi_client._tensors import INPUT_TYPES, build_inputs
from kimi_openai.errors import ApiError
from kimi_openai.request_fields import IGNORED, REFUSED, ChatRequest, CompletionRequest, GenerationRequest
from kimi_openai.request_parsing import parse_body
from kimi_openai.server_fields import SAME_NAME, chat_fields, completion_fields

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
KINDS = {ChatRequest: lambda body: [chat_fields(body)], CompletionRequest: completion_fields}


def chat(**values):
    return chat_fields(parse_body(json.dumps({"messages": MESSAGES, **values}).encode(), ChatRequest)).fields


def complete(**values):
    (asked,) = completions(**values)
    return asked.fields


def completions(**values):
    return completion_fields(parse_body(json.dumps({"prompt": "a", **values}).encode(), CompletionRequest))


BAD_COMPLETIONS = [
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 20, "prompt": ["ü" * 1249] * 5, "n": 2}, "prompt_logprobs"),
    ({"echo": True, "logprobs": 1, "prompt": [[1] * 2049] * 128}, "logprobs"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**31]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a", 3]}, "prompt[1]"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": [[[1]]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"temperature": "0.5"}, "temperature"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e300}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": [1]}, "top_p"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"seed": 2**64}, "seed"),
    ({"stop": 3}, "stop"),
    ({"stop": ["a", 3]}, "stop[1]"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"7": "x"}}, "logit_bias.7"),
    ({"logprobs": True}, "logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge"),
    ({"stream": True, "stream_options": 3}, "stream_options"),
    ({"model": 3}, "model"),
    ({"n": 17}, "n"),
    ({"n": 0}, "n"),
    ({"n": 10**400}, "n"),
    ({"n": True}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"guided_json": {}}, "guided_json"),
    ({"suffix": "x"}, "suffix"),
    ({"response_format": "json"}, "response_format"),
    ({"structured_outputs": []}, "structured_outputs"),
    ({"messages": MESSAGES}, "messages"),
    ({"temprature": 1}, "temprature"),
    ({"x" * 500: 1}, "x" * 77 + "..."),
]
BAD_CHATS = [
    ({"prompt_logprobs": 1, "n": 2}, "n"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"prompt": "a"}, "prompt"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": "3", "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
    ({"tools": "f"}, "tools"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": TOOL}, "tool_choice"),
    ({"parallel_tool_calls": 0}, "parallel_tool_calls"),
    ({"thinking": "off"}, "thinking"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "thinking"),
    ({"enable_thinking": False, "chat_template_kwargs": {"thinking": True}}, "enable_thinking"),
    ({"functions": []}, "functions"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"modalities": ["text", "audio"]}, "modalities"),
]


@pytest.mark.parametrize(("values", "param"), BAD_COMPLETIONS, ids=[param for _, param in BAD_COMPLETIONS])
def test_a_bad_completion_is_told_which_field(values, param):
    with pytest.raises(ApiError) as caught:
        complete(**values)
    error = caught.value
    assert (error.status, error.param) == (400, param)
    assert str(error).startswith(param + ": ")
    assert len(str(error)) < 400


@pytest.mark.parametrize(("values", "param"), BAD_CHATS, ids=[param for _, param in BAD_CHATS])
def test_a_bad_chat_is_told_which_field(values, param):
    with pytest.raises(ApiError) as caught:
        chat(**values)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("values", "scored"),
    [
        ({"echo": True, "logprobs": 2}, 2),
        ({"echo": True, "logprobs": 0}, 0),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 5}, 5),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 1}, 2),
        ({"prompt_logprobs": 3}, 3),
        ({"prompt": "ü" * 2**20, "echo": True, "logprobs": 1}, 1),  # the server knows its tokens
        ({"echo": True}, None),
        ({"logprobs": 2}, None),
    ],
)
def test_a_prompt_is_scored_where_echo_shows_its_logprobs(values, scored):
    assert complete(**values).get("prompt_logprobs") == scored


# fmt: off
OF_OPENAI_AND_VLLM = [
    "audio", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs", "max_completion_tokens",
    "max_tokens", "metadata", "modalities", "model", "n", "parallel_tool_calls", "prediction", "presence_penalty",
    "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "response_format", "safety_identifier",
    "seed", "service_tier", "stop", "store", "stream", "stream_options", "temperature", "tool_choice", "tools",
    "top_logprobs", "top_p", "user", "verbosity", "web_search_options", "best_of", "echo", "suffix",
    "use_beam_search", "top_k", "min_p", "repetition_penalty", "length_penalty", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
    "spaces_between_special_tokens", "truncate_prompt_tokens", "prompt_logprobs", "allowed_token_ids",
    "bad_words", "add_generation_prompt", "continue_final_message", "add_special_tokens", "documents",
    "chat_template", "chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs", "structured_outputs",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "priority", "request_id",
    "logits_processors", "return_tokens_as_token_ids", "return_token_ids", "cache_salt", "kv_transfer_params",
    "vllm_xargs", "include_reasoning",
]
# fmt: on


def test_every_name_that_openai_or_vllm_document_is_known():
    known = {*ChatRequest.model_fields, *CompletionRequest.model_fields, *REFUSED, *IGNORED}
    assert set(OF_OPENAI_AND_VLLM) <= known


def test_an_unknown_name_may_be_left_out(caplog):
    body = b'{"prompt": "a", "temprature": 1}'
    assert parse_body(body, CompletionRequest, refuses_unknown=False).model_fields_set == {"prompt"}
    assert "temprature" in caplog.text
    with pytest.raises(ApiError, match=r"^best_of"):
        parse_body(b'{"prompt": "a", "best_of": 3}', CompletionRequest, refuses_unknown=False)


def test_a_mistyped_name_gets_a_suggestion():
    with pytest.raises(ApiError, match="is temperature meant"):
        complete(temprature=1)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[", b"[1]", b"null", b"3", b"\xff", b'"\\ud800"', b'{"prompt": "a", "min_p": NaN}', b"[" * 200_000),
        *(b'{"prompt": "\xed\xa0\x80"}', b"\xef\xbb\xbf{}", b'{"a":' * 100_000, b'{"prompt": "a"}{', b"prompt=a"),
        b'{"max_tokens": 1' + b"0" * 100_000 + b"}",
    ],
    ids=lambda body: repr(body[:12]),
)
def test_what_is_no_json_object_is_a_bad_request(body):
    with pytest.raises(ApiError) as caught:
        parse_body(body, CompletionRequest)
    assert caught.value.status == 400
    assert len(str(caught.value)) < 400


def test_null_is_as_good_as_not_given():
    names = [*CompletionRequest.model_fields, *REFUSED, *IGNORED, *OF_OPENAI_AND_VLLM]
    assert complete(**{name: None for name in names if name != "prompt"}) == complete()


def test_what_changes_nothing_is_accepted():
    harmless = {"best_of": 1, "echo": False, "suffix": "", "user": "me", "metadata": {"a": "b"}, "store": True}
    assert complete(**harmless) == complete() == {"text_input": "a", "max_tokens": 16}
    assert chat(modalities=["text"], parallel_tool_calls=True) == chat()


def test_prompts():
    assert complete(prompt=["a"]) == complete(prompt="a")
    assert complete(prompt=[1, 2])["input_ids"] == complete(prompt=[[1, 2]])["input_ids"] == [1, 2]
    first, second = completions(prompt=["b", [3]], seed=4)
    assert (first.fields["text_input"], second.fields["input_ids"]) == ("b", [3])
    assert (second.names, second.prompt_name) == ({"input_ids": "prompt[1]", "prompt": "prompt[1]"}, "prompt[1]")


def test_a_chats_fields():
    assert chat() == {"messages": MESSAGES, "return_control_offsets": True}
    assert chat(max_tokens=3)["max_tokens"] == chat(max_completion_tokens=3)["max_tokens"] == 3
    assert chat(max_tokens=3, max_completion_tokens=3)["max_tokens"] == 3
    assert chat(logprobs=True)["logprobs"] == 0
    assert chat(logprobs=True, top_logprobs=4)["logprobs"] == 4
    assert "logprobs" not in chat(logprobs=False)
    assert chat(tools=[TOOL])["tools"] == chat(tools=[TOOL], tool_choice="auto")["tools"] == [TOOL]
    assert "tools" not in chat(tools=[TOOL], tool_choice="none")
    assert "tools" not in chat(tools=[])
    assert chat(chat_template_kwargs={"thinking": False})["chat_template_kwargs"] == {"thinking": False}


def test_all_ways_to_turn_thinking_off_are_one():
    off = {"thinking": False}
    for field in ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}, {"reasoning_effort": "none"}):
        assert chat(**field)["chat_template_kwargs"] == off
        assert chat(**field, chat_template_kwargs={"a": 1})["chat_template_kwargs"] == {"a": 1} | off
        assert chat(**field, chat_template_kwargs=off)["chat_template_kwargs"] == off
    assert chat(thinking={"type": "enabled"})["chat_template_kwargs"] == {"thinking": True}
    assert chat(chat_template_kwargs={"thinking": []})["chat_template_kwargs"] == {"thinking": []}


def test_an_effort_is_a_budget():
    for effort, budget in (("low", 1024), ("medium", 8192), ("high", None), ("none", None), (None, None)):
        assert chat(reasoning_effort=effort).get("thinking_token_budget") == budget
        assert chat(reasoning_effort=effort, thinking_token_budget=7)["thinking_token_budget"] == 7


def test_a_single_call_ends_the_reply():
    assert chat(tools=[TOOL], parallel_tool_calls=False)["stop_control_tokens"] == ["<|tool_call_end|>"]
    for more in ({"parallel_tool_calls": True}, {"parallel_tool_calls": False, "tool_choice": "none"}):
        assert "stop_control_tokens" not in chat(tools=[TOOL], **more)


def test_a_forced_call_is_the_servers_to_force():
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        fields = chat(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
        assert (fields["tool_choice"], fields["parallel_tool_calls"]) == (choice, False)
        assert "stop_control_tokens" not in fields
        assert "parallel_tool_calls" not in chat(tools=[TOOL], tool_choice=choice)
    assert "tool_choice" not in chat(tools=[TOOL], tool_choice="auto")


def test_what_a_reply_must_look_like_goes_to_the_server():
    for field in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "a"}}):
        assert chat(**field).items() >= field.items()
        assert complete(**field).items() >= field.items()


def test_small_things_as_openai_takes_them():
    assert complete(seed=-1)["seed"] == 2**64 - 1
    assert complete(stream=True, stream_options={"include_usage": None}) == complete()


def test_stop_may_be_a_text_or_a_list():
    assert complete(stop="x")["stop"] == complete(stop=["x"])["stop"] == ["x"]
    assert "stop" not in complete(stop=[])


def test_every_field_has_a_way_to_the_server_and_every_input_a_field():
    elsewhere = {"model", "stream", "stream_options", "n"}
    assert set(GenerationRequest.model_fields) == {*SAME_NAME} | elsewhere
    reached = {*SAME_NAME, "stream", "text_input", "input_ids", "messages", "logprobs", "tools", "chat_template_kwargs"}
    reached |= {"echo"}
    reached |= {"return_control_offsets", "return_round_times", "stop_control_tokens", "thinking_token_budget"}
    reached |= {"tool_choice", "parallel_tool_calls"}
    of_the_server = {"return_step_costs"}  # nothing about the request
    assert reached | of_the_server == set(INPUT_TYPES)
    known = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert not known & set(IGNORED)
    assert known & set(REFUSED) == {"echo"}, "of a chat"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *REFUSED, *IGNORED})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=150, deadline=None)
@given(values=st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6), prompt=JSON)
def test_no_json_fails_in_another_way(kind, values, prompt):
    whole = {"prompt" if kind is CompletionRequest else "messages": prompt} | values
    with contextlib.suppress(ApiError, InvalidRequest):
        for asked in KINDS[kind](parse_body(json.dumps(whole).encode(), kind)):
            build_inputs(asked.fields)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_no_bytes_fail_in_another_way(body):
    with pytest.raises(ApiError):
        parse_body(body, ChatRequest)
