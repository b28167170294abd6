"""A checked request -> the fields of `spec_ensemble`, and what this request calls them."""

from dataclasses import dataclass
from typing import Any

from kimi_openai.errors import bad_field
from kimi_openai.request_fields import ChatRequest, CompletionRequest, GenerationRequest
from kimi_openai.request_parsing import shown

EFFORT_TOKENS: dict[str | None, int] = {"low": 1024, "medium": 8192}
"""reasoning_effort -> most tokens of thoughts; others have no limit."""
CALL_END = "<|tool_call_end|>"
MOST_PROMPT_LOGPROBS = 2**19
"""Log-probabilities of all prompts of a call, some 100 MB here: their tokens and the most likely ones beside each."""
MOST_CHOICES = 256
"""The most choices of one call: each is a request of its own on the server, whose queue others need too."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for completions; chats have none."""

SAME_NAME = (
    *("max_tokens", "temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "allowed_token_ids", "bad_words"),
    *("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "num_speculative_tokens"),
    *(
        "response_format",
        "structured_outputs",
        "proposer",
        "cache_salt",
        "priority",
        "timeout_s",
        "prompt_logprobs",
        "return_token_ids",
        "return_token_origins",
    ),
)


@dataclass(frozen=True, slots=True)
class ServerRequest:
    fields: dict[str, Any]
    """Arguments of `AsyncKimiClient.stream`."""
    names: dict[str, str]
    """The server's name of a field -> this request's, where they differ."""
    prompt_name: str | None = None
    """The name of this one of several prompts in errors; None where there is only one."""


def chat_fields(request: ChatRequest) -> ServerRequest:
    """
    Raises:
        ApiError: fields that contradict each other, or a tool choice that is none.
    """
    fields = _common_fields(request)
    names = {"prompt": "messages", "logprobs": "top_logprobs"}
    fields["messages"] = request.messages
    if request.prompt_logprobs is not None and (request.n or 1) > 1:
        raise bad_field("n", f"{request.n} given, with prompt_logprobs only 1 is supported")
    if request.max_completion_tokens is not None:
        if request.max_tokens not in (None, request.max_completion_tokens):
            raise bad_field("max_completion_tokens", f"{request.max_completion_tokens} given, and another max_tokens")
        fields["max_tokens"] = request.max_completion_tokens
        names["max_tokens"] = "max_completion_tokens"
    if request.logprobs:
        fields["logprobs"] = request.top_logprobs or 0
    elif request.top_logprobs is not None:
        raise bad_field("top_logprobs", f"{request.top_logprobs} given, it needs logprobs: true")
    if declares_tools(request):
        fields["tools"] = request.tools
        is_forced = request.tool_choice not in (None, "auto")
        if is_forced:
            fields["tool_choice"] = request.tool_choice
        if request.parallel_tool_calls is False and is_forced:
            fields["parallel_tool_calls"] = False
        elif request.parallel_tool_calls is False:
            fields["stop_control_tokens"] = [CALL_END]
            names["stop_control_tokens"] = "parallel_tool_calls"
    if (kwargs := _template_kwargs(request)) is not None:
        fields["chat_template_kwargs"] = kwargs
    budget = request.thinking_token_budget
    if budget is None and request.reasoning_effort in EFFORT_TOKENS:
        budget = EFFORT_TOKENS[request.reasoning_effort]
        names["thinking_token_budget"] = "reasoning_effort"
    if budget is not None:
        fields["thinking_token_budget"] = budget
    fields["return_control_offsets"] = True
    return ServerRequest(fields, names)


def _template_kwargs(request: ChatRequest) -> dict[str, Any] | None:
    """The template's arguments, with the one switch for thinking that all ways to ask for it come to."""
    kwargs = request.chat_template_kwargs
    given = {
        "thinking": None if request.thinking is None else request.thinking.type == "enabled",
        "enable_thinking": request.enable_thinking,
        "reasoning_effort": False if request.reasoning_effort == "none" else None,
    }
    switches = {name: is_on for name, is_on in given.items() if is_on is not None}
    in_kwargs = [bool(kwargs[name]) for name in ("thinking", "enable_thinking") if kwargs and name in kwargs]
    if not switches:
        return kwargs
    field, is_on = next(iter(switches.items()))
    if {*switches.values(), *in_kwargs} != {is_on}:
        raise bad_field(field, f"turns thinking {'on' if is_on else 'off'}, and another field of the request does not")
    return kwargs if in_kwargs else {**(kwargs or {}), "thinking": is_on}


def declares_tools(request: ChatRequest) -> bool:
    """Tell whether the model may call tools.

    Raises:
        ApiError: see `chat_fields`.
    """
    choice = request.tool_choice
    if not isinstance(choice, dict) and choice not in (None, "auto", "none", "required"):
        raise bad_field("tool_choice", f'{shown(choice)} given, "auto", "none", "required" or an object is allowed')
    if not request.tools and choice not in (None, "auto", "none"):
        raise bad_field("tool_choice", f"{shown(choice)} given, it needs tools")
    return bool(request.tools) and request.tool_choice != "none"


def completion_fields(request: CompletionRequest) -> list[ServerRequest]:
    """One for each prompt, in their order.

    Raises:
        ApiError: a prompt that is none, or too many of them.
    """
    prompts, n = _prompts(request.prompt), request.n or 1
    if len(prompts) * n > MOST_CHOICES:
        given = f"{len(prompts)} prompts of {n} choices each given" if n > 1 else f"{len(prompts)} given"
        raise bad_field("prompt", f"{given}, at most {MOST_CHOICES} choices a request are allowed")
    fields = _common_fields(request)
    fields.setdefault("max_tokens", DEFAULT_COMPLETION_TOKENS)
    if request.logprobs is not None:
        fields["logprobs"] = request.logprobs
    names: dict[str, str] = {}
    if request.echo:
        fields["echo"] = True
        if request.logprobs is not None and request.logprobs > fields.get("prompt_logprobs", -1):
            fields["prompt_logprobs"] = request.logprobs
            names["prompt_logprobs"] = "logprobs"
    if len(prompts) == 1:
        field, value = _prompt("prompt", prompts[0])
        asked = [ServerRequest({**fields, field: value}, {**names, field: "prompt"})]
    else:
        asked = []
        for index, prompt in enumerate(prompts):
            name = f"prompt[{index}]"
            field, value = _prompt(name, prompt)
            asked.append(ServerRequest({**fields, field: value}, {**names, field: name, "prompt": name}, name))
    if (num_top := fields.get("prompt_logprobs")) is not None:
        _check_scores(names.get("prompt_logprobs", "prompt_logprobs"), num_top, prompts, n)
    return asked


def _check_scores(field: str, num_top: int, prompts: list[Any], n: int) -> None:
    """Pass silently unless the scores of several prompts together would take too much memory; the server limits those
    of one. A text's bytes stand for its tokens, which are no more."""
    texts = (len(prompt.encode("utf-8", "surrogatepass")) for prompt in prompts if isinstance(prompt, str))
    num_tokens = n * (sum(texts) + sum(len(prompt) for prompt in prompts if isinstance(prompt, list)))
    if n * len(prompts) > 1 and num_tokens * (1 + num_top) > MOST_PROMPT_LOGPROBS:
        given = f"{num_top} given for {num_tokens} tokens, or bytes, of all choices' prompts"
        allowed = f"at most {MOST_PROMPT_LOGPROBS // max(1 + num_top, 1)} of them are allowed with it"
        raise bad_field(field, f"{given}, {allowed}; ask for fewer prompts at once")


def _common_fields(request: GenerationRequest) -> dict[str, Any]:
    if request.stream_options is not None and not request.stream:
        raise bad_field("stream_options", "given, it needs stream: true")
    if request.prompt_logprobs is not None and request.stream:
        raise bad_field("prompt_logprobs", f"{request.prompt_logprobs} given, with stream: true it is not supported")
    if request.allowed_token_ids == []:
        raise bad_field("allowed_token_ids", "[] given, at least one token must be allowed")
    given = {name: getattr(request, name) for name in SAME_NAME}
    if request.seed is not None:
        given["seed"] = request.seed % 2**64
    return {name: value for name, value in given.items() if value is not None and value != []}


def _prompts(prompt: Any) -> list[Any]:
    is_list = isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list))
    return prompt if is_list else [prompt]


def _prompt(name: str, prompt: Any) -> tuple[str, Any]:
    """The server's field for it, and its value."""
    if isinstance(prompt, str):
        return "text_input", prompt
    if isinstance(prompt, list) and prompt and all(map(_is_token_id, prompt)):
        return "input_ids", prompt
    raise bad_field(name, f"{shown(prompt)} given, a text or a list of token ids is allowed")


def _is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31
