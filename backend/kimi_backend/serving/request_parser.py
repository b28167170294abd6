"""A server request's fields -> a tokenised `GenerateRequest` and what its responses should carry."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kimi_backend.errors import InvalidRequestError
from kimi_backend.scheduler.admission import check_prompt_length
from kimi_backend.serving.grammar_fields import grammar_of
from kimi_backend.serving.request_values import collect_values, is_number, is_token_id, shown
from kimi_backend.text.tokenizer import Tokenizer
from kimi_backend.types.grammar import Grammar
from kimi_backend.types.proposer import Proposer
from kimi_backend.types.request import GenerateRequest, SamplingParams, ThinkingBudget

PROMPT_FIELDS = ("text_input", "messages", "input_ids")

THINK_BEGIN, THINK_END = "<think>", "</think>"

EncodeChat = Callable[..., list[int]]
"""encode_chat(messages, *, tools, template_kwargs, enough) -> prompt token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    generate: GenerateRequest
    stream: bool
    """One response a step; else one in all."""
    return_token_ids: bool
    return_control_offsets: bool = False
    echo: bool = False
    """The text begins with that of the prompt."""
    begins_thinking: bool | None = None
    """The prompt ends inside a think block; None where nobody asked."""


class RequestParser:
    """Parses and tokenises. Ranges of sampling parameters are the engine's to check."""

    def __init__(self, tokenizer: Tokenizer, encode_chat: EncodeChat | None, default_max_tokens: int) -> None:
        """
        Args:
            encode_chat: None when the checkpoint has no chat template.
            default_max_tokens: 0 leaves the number of output tokens to the model's longest sequence.
        """
        self._tokenizer = tokenizer
        self._encode_chat = encode_chat
        self._default_max_tokens = default_max_tokens

    def parse(
        self,
        request_id: str,
        tensors: Mapping[str, Any],
        parameters: Mapping[str, Any],
        max_prompt_tokens: int | None = None,
    ) -> ParsedRequest:
        """See `collect_values` for the arguments and for the errors; more come from the prompt and its fields.

        Args:
            max_prompt_tokens: what cannot be so short is refused unread, and of what is longer only the beginning is
                tokenised: 6 MB take more than a second and 80 MB of memory.
        """
        if max_prompt_tokens is not None and "input_ids" in tensors:
            check_prompt_length(tensors["input_ids"].size, max_prompt_tokens)
        values = collect_values(tensors, parameters)
        if values.get("exclude_input_in_output", True) is not True:
            raise InvalidRequestError("exclude_input_in_output: false given, only true is supported")
        prompt = self._prompt_token_ids(values, max_prompt_tokens)
        if max_prompt_tokens is not None:
            check_prompt_length(len(prompt), max_prompt_tokens, is_beginning=True)
        generate = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling=self._sampling(values, self._thinking_budget(values, prompt), self._grammar(values, prompt)),
            num_speculative_tokens=values.get("num_speculative_tokens"),
            proposer=_proposer(values.get("proposer")),
            priority=values.get("priority", 0),
            timeout_s=values.get("timeout_s"),
            cache_salt=values.get("cache_salt"),
            return_token_origins=values.get("return_token_origins", False),
            return_round_times=values.get("return_round_times", 0),
            return_step_costs=values.get("return_step_costs", False),
        )
        return_control_offsets = values.get("return_control_offsets", False)
        return ParsedRequest(
            generate=generate,
            stream=values.get("stream", False),
            return_token_ids=values.get("return_token_ids", False),
            return_control_offsets=return_control_offsets,
            echo=values.get("echo", False),
            begins_thinking=self._ends_thinking(prompt) if return_control_offsets else None,
        )

    def _ends_thinking(self, prompt: list[int]) -> bool:
        """Tell whether the prompt's last control token opens a think block: what comes next are thoughts."""
        controls = frozenset(self._tokenizer.control_tokens.values())
        last = next((token_id for token_id in reversed(prompt) if token_id in controls), None)
        return last is not None and last == self._tokenizer.control_tokens.get(THINK_BEGIN)

    def _prompt_token_ids(self, values: dict[str, Any], max_prompt_tokens: int | None) -> list[int]:
        given = [name for name in PROMPT_FIELDS if name in values]
        if len(given) != 1:
            what = "none was given" if not given else f"{' and '.join(given)} were given"
            raise InvalidRequestError(f"prompt: exactly one of {', '.join(PROMPT_FIELDS)} is needed, {what}")
        if given[0] != "messages":
            for name in ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"):
                if name in values:
                    raise InvalidRequestError(f"{name}: goes with messages only, {given[0]} was given")
        enough = math.inf if max_prompt_tokens is None else max_prompt_tokens
        if given[0] == "input_ids":
            prompt: list[int] = values["input_ids"]
        elif given[0] == "text_input":
            self._check_length("text_input", len(values["text_input"]), max_prompt_tokens)
            prompt = self._tokenizer.encode(values["text_input"], enough=enough)
        else:
            self._check_length("messages", _content_length(values["messages"]), max_prompt_tokens)
            prompt = self._render_chat(values, enough)
        if not prompt:
            raise InvalidRequestError(f"{given[0]}: empty, at least 1 token is needed")
        return prompt

    def _check_length(self, name: str, num_characters: int, max_prompt_tokens: int | None) -> None:
        if max_prompt_tokens is None or (longest := self._tokenizer.longest_token_bytes) is None:
            return
        if num_characters > longest * max_prompt_tokens:
            raise InvalidRequestError(
                f"{name}: {num_characters} characters given, which are more than the {max_prompt_tokens} tokens that"
                f" are allowed, as none has more than {longest} bytes"
            )

    def _render_chat(self, values: dict[str, Any], enough: float) -> list[int]:
        if self._encode_chat is None:
            raise InvalidRequestError("messages: this checkpoint has no chat template; give text_input or input_ids")
        kwargs = values.get("chat_template_kwargs") or {}
        if not isinstance(kwargs, dict):
            raise InvalidRequestError(f"chat_template_kwargs: {shown(kwargs)} given, a JSON object is allowed")
        tools = None if values.get("tool_choice") == "none" else values.get("tools")
        return self._encode_chat(values["messages"], tools=tools, template_kwargs=kwargs, enough=enough)

    def _grammar(self, values: dict[str, Any], prompt: list[int]) -> Grammar | None:
        controls = self._tokenizer.control_tokens
        return grammar_of(values, controls, controls.get(THINK_END) if self._ends_thinking(prompt) else None)

    def _thinking_budget(self, values: dict[str, Any], prompt: list[int]) -> ThinkingBudget | None:
        num_tokens = values.get("thinking_token_budget")
        if num_tokens is None:
            return None
        end_token_id = self._tokenizer.control_tokens.get(THINK_END)
        if num_tokens < 0 or end_token_id is None:
            allowed = "0 or more is allowed" if end_token_id is not None else f"the model has no token {THINK_END}"
            raise InvalidRequestError(f"thinking_token_budget: {num_tokens} given, {allowed}")
        return ThinkingBudget(num_tokens, end_token_id) if self._ends_thinking(prompt) else None

    def _sampling(
        self, values: dict[str, Any], thinking_budget: ThinkingBudget | None, grammar: Grammar | None
    ) -> SamplingParams:
        if values.get("allowed_token_ids") == []:
            raise InvalidRequestError("allowed_token_ids: [] given, at least one token must be allowed")
        names = (
            "temperature",
            "top_p",
            "min_p",
            "seed",
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
            "min_tokens",
            "skip_special_tokens",
            "ignore_eos",
            "logprobs",
            "prompt_logprobs",
        )
        plain = {name: values[name] for name in names if name in values}
        return SamplingParams(
            **plain,
            top_k=0 if values.get("top_k") == -1 else values.get("top_k", 0),
            max_tokens=values.get("max_tokens", self._default_max_tokens or None),
            thinking_budget=thinking_budget,
            grammar=grammar,
            stop=tuple(values.get("stop", ())),
            stop_token_ids=(*values.get("stop_token_ids", ()), *self._control_ids(values)),
            allowed_token_ids=tuple(values.get("allowed_token_ids", ())),
            include_stop_in_output=values.get("include_stop_str_in_output", False),
            logit_bias=_logit_bias(values.get("logit_bias", {})),
            bad_words=self._bad_words(values.get("bad_words", [])),
        )

    def _control_ids(self, values: dict[str, Any]) -> list[int]:
        names = values.get("stop_control_tokens", [])
        for name in names:
            if name not in self._tokenizer.control_tokens:
                raise InvalidRequestError(f"stop_control_tokens: {shown(name)} given, which is no control token")
        return [self._tokenizer.control_tokens[name] for name in names]

    def _bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is tokenised at the start of a text and after a space."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            if not word.strip():
                raise InvalidRequestError(f"bad_words: {word!r} given, words that are not blank are allowed")
            for text in (word, f" {word.lstrip()}"):
                sequences[tuple(self._tokenizer.encode(text))] = None
        return tuple(sequences)


def _content_length(messages: Any) -> int:
    """Characters of the texts that a template renders whole; what is no chat is refused when it is rendered."""
    contents = [m.get("content") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return sum(len(text) for text in texts if isinstance(text, str))


def _proposer(value: str | None) -> Proposer | None:
    if value is None:
        return None
    try:
        return Proposer(value)
    except ValueError:
        allowed = ", ".join(proposer.value for proposer in Proposer)
        raise InvalidRequestError(f"proposer: {shown(value)} given, one of {allowed} is allowed") from None


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"logit_bias: {shown(value)} given, a JSON object of token id -> number is allowed")
    bias: dict[int, float] = {}
    for key, number in value.items():
        if not is_token_id(key) or not is_number(number):
            raise InvalidRequestError(f"logit_bias: {shown(key)}: {shown(number)} given, token id -> number is allowed")
        bias[int(key)] = float(number)
    return bias
