"""The fields that a request may carry; written by `make generated` from the server's table.

A copy, because this package imports nothing of the server.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class RequestFields(TypedDict, total=False):
    """Fields of a request; None leaves a field out. JSON fields are given as Python values, or as JSON text."""

    text_input: str | None
    """Prompt as text; special tokens in it are encoded as plain text."""
    messages: Sequence[Mapping[str, Any]] | str | None
    """Prompt as a JSON list of chat messages, rendered by the chat template."""
    input_ids: Sequence[int] | None
    """Prompt as token ids."""
    stream: bool | None
    """One response a step instead of one in all (default false)."""
    max_tokens: int | None
    """Most output tokens; 0 draws none (default: the setting `default_max_tokens`)."""
    min_tokens: int | None
    """No stop token before this many output tokens (default 0)."""
    temperature: float | None
    """0 is greedy (default 1)."""
    top_k: int | None
    """Keep the k most likely tokens; 0 or -1 keeps all (default 0)."""
    top_p: float | None
    """Keep the most likely tokens up to this mass (default 1)."""
    min_p: float | None
    """Keep tokens at least this likely, relative to the best (default 0)."""
    seed: int | None
    """Same seed, same text; without one the server picks one and reports it."""
    repetition_penalty: float | None
    """Makes tokens of prompt and output less likely, over 1; 0.01 to 100 (default 1)."""
    presence_penalty: float | None
    """Lowers a token's logit if the token stands in the output (default 0)."""
    frequency_penalty: float | None
    """Lowers a token's logit for each time that it stands in the output (default 0)."""
    logit_bias: Mapping[int, float] | Mapping[str, float] | str | None
    """JSON object: token id -> number added to its logit."""
    allowed_token_ids: Sequence[int] | None
    """Only these tokens may come (default: all)."""
    bad_words: str | Sequence[str] | None
    """Texts that may not appear."""
    stop: str | Sequence[str] | None
    """Texts that end the output; not part of it."""
    stop_token_ids: Sequence[int] | None
    """Tokens that end the output."""
    stop_control_tokens: str | Sequence[str] | None
    """Control tokens that end the output, such as </think>."""
    include_stop_str_in_output: bool | None
    """Keep the stop text in the output (default false)."""
    skip_special_tokens: bool | None
    """Leave special tokens out of the text (default true)."""
    ignore_eos: bool | None
    """Do not stop at the end-of-sequence token (default false)."""
    logprobs: int | None
    """Log-probabilities of each token and of this many most likely ones."""
    prompt_logprobs: int | None
    """The same of the prompt's tokens, which are computed all then, cached or not."""
    num_speculative_tokens: int | None
    """Draft tokens a step, 0 to 7 (default: the setting of that name)."""
    proposer: str | None
    """Proposers of tokens: none, eagle3, lookup or lookup+eagle3, as far as the server has them (default: all)."""
    priority: int | None
    """Higher runs first and is preempted last (default 0)."""
    cache_salt: str | None
    """Requests share cached prefixes only with requests of the same salt."""
    response_format: Mapping[str, Any] | str | None
    """Form of the reply: {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": …}} or "text"."""
    structured_outputs: Mapping[str, Any] | str | None
    """The same as vLLM says it: a JSON object with one of json, regex, choice, grammar, json_object."""
    tools: Sequence[Mapping[str, Any]] | str | None
    """JSON list of tools for the chat template."""
    tool_choice: Mapping[str, Any] | str | None
    """auto (default), none, required, or {"type": "function", "function": {"name": …}}: the reply is calls then."""
    parallel_tool_calls: bool | None
    """Forced calls may be several (default true)."""
    chat_template_kwargs: Mapping[str, Any] | str | None
    """JSON object for the chat template, such as {"thinking": false}."""
    thinking_token_budget: int | None
    """Most tokens of thoughts, where the prompt ends inside a think block; the next one ends it."""
    echo: bool | None
    """The text begins with that of the prompt (default false)."""
    return_token_ids: bool | None
    """Send `output_ids` and `prompt_token_ids` too (default false)."""
    return_token_origins: bool | None
    """Send `token_origins` and `token_offsets` too (default false)."""
    return_control_offsets: bool | None
    """Send `control_offsets` and `begins_thinking` too (default false)."""
    return_round_times: int | None
    """Most rounds whose times `statistics` has, evenly spread over the reply; 0 to 64 (default 0)."""
    return_step_costs: bool | None
    """Send in `statistics` what steps cost, which k is chosen by (default false)."""


INPUT_TYPES = {
    "text_input": "BYTES",
    "messages": "BYTES",
    "input_ids": "INT32",
    "stream": "BOOL",
    "max_tokens": "INT32",
    "min_tokens": "INT32",
    "temperature": "FP32",
    "top_k": "INT32",
    "top_p": "FP32",
    "min_p": "FP32",
    "seed": "UINT64",
    "repetition_penalty": "FP32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "logit_bias": "BYTES",
    "allowed_token_ids": "INT32",
    "bad_words": "BYTES",
    "stop": "BYTES",
    "stop_token_ids": "INT32",
    "stop_control_tokens": "BYTES",
    "include_stop_str_in_output": "BOOL",
    "skip_special_tokens": "BOOL",
    "ignore_eos": "BOOL",
    "logprobs": "INT32",
    "prompt_logprobs": "INT32",
    "num_speculative_tokens": "INT32",
    "proposer": "BYTES",
    "priority": "INT32",
    "timeout_s": "FP32",
    "cache_salt": "BYTES",
    "response_format": "BYTES",
    "structured_outputs": "BYTES",
    "tools": "BYTES",
    "tool_choice": "BYTES",
    "parallel_tool_calls": "BOOL",
    "chat_template_kwargs": "BYTES",
    "thinking_token_budget": "INT32",
    "echo": "BOOL",
    "return_token_ids": "BOOL",
    "return_token_origins": "BOOL",
    "return_control_offsets": "BOOL",
    "return_round_times": "INT32",
    "return_step_costs": "BOOL",
}
JSON_INPUTS = frozenset(
    {"messages", "logit_bias", "response_format", "structured_outputs", "tools", "tool_choice", "chat_template_kwargs"}
)
