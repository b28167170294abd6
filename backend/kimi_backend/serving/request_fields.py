"""The request surface of `spec_ensemble`: every input tensor, declared once.

A field may be given as an input tensor, as a request parameter, or inside the JSON object `sampling_parameters`; giving
it in two places is refused. config.pbtxt and docs/protocol.md list the same fields, checked by a test.
"""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """A field's type in Python and in a config.pbtxt."""

    TEXT = "TYPE_STRING"
    TEXTS = "TYPE_STRING[]"
    JSON = "TYPE_STRING{}"
    INT = "TYPE_INT32"
    INTS = "TYPE_INT32[]"
    UINT64 = "TYPE_UINT64"
    FLOAT = "TYPE_FP32"
    BOOL = "TYPE_BOOL"

    @property
    def data_type(self) -> str:
        return self.value.rstrip("[]{}")

    @property
    def is_list(self) -> bool:
        return self in (Kind.TEXTS, Kind.INTS)


@dataclass(frozen=True, slots=True)
class RequestField:
    name: str
    kind: Kind
    meaning: str


INPUT_FIELDS = (
    RequestField("text_input", Kind.TEXT, "Prompt as text; special tokens in it are encoded as plain text."),
    RequestField("messages", Kind.JSON, "Prompt as a JSON list of chat messages, rendered by the chat template."),
    RequestField("input_ids", Kind.INTS, "Prompt as token ids."),
    RequestField("stream", Kind.BOOL, "One response a step instead of one in all (default false)."),
    RequestField(
        "max_tokens", Kind.INT, "Most output tokens; 0 draws none (default: the setting `default_max_tokens`)."
    ),
    RequestField("min_tokens", Kind.INT, "No stop token before this many output tokens (default 0)."),
    RequestField("temperature", Kind.FLOAT, "0 is greedy (default 1)."),
    RequestField("top_k", Kind.INT, "Keep the k most likely tokens; 0 or -1 keeps all (default 0)."),
    RequestField("top_p", Kind.FLOAT, "Keep the most likely tokens up to this mass (default 1)."),
    RequestField("min_p", Kind.FLOAT, "Keep tokens at least this likely, relative to the best (default 0)."),
    RequestField("seed", Kind.UINT64, "Same seed, same text; without one the server picks one and reports it."),
    RequestField(
        "repetition_penalty",
        Kind.FLOAT,
        "Makes tokens of prompt and output less likely, over 1; 0.01 to 100 (default 1).",
    ),
    RequestField(
        "presence_penalty", Kind.FLOAT, "Lowers a token's logit if the token stands in the output (default 0)."
    ),
    RequestField(
        "frequency_penalty",
        Kind.FLOAT,
        "Lowers a token's logit for each time that it stands in the output (default 0).",
    ),
    RequestField("logit_bias", Kind.JSON, "JSON object: token id -> number added to its logit."),
    RequestField("allowed_token_ids", Kind.INTS, "Only these tokens may come (default: all)."),
    RequestField("bad_words", Kind.TEXTS, "Texts that may not appear."),
    RequestField("stop", Kind.TEXTS, "Texts that end the output; not part of it."),
    RequestField("stop_words", Kind.TEXTS, "Same as `stop`."),
    RequestField("stop_token_ids", Kind.INTS, "Tokens that end the output."),
    RequestField("stop_control_tokens", Kind.TEXTS, "Control tokens that end the output, such as </think>."),
    RequestField("include_stop_str_in_output", Kind.BOOL, "Keep the stop text in the output (default false)."),
    RequestField("skip_special_tokens", Kind.BOOL, "Leave special tokens out of the text (default true)."),
    RequestField("ignore_eos", Kind.BOOL, "Do not stop at the end-of-sequence token (default false)."),
    RequestField("logprobs", Kind.INT, "Log-probabilities of each token and of this many most likely ones."),
    RequestField(
        "prompt_logprobs", Kind.INT, "The same of the prompt's tokens, which are computed all then, cached or not."
    ),
    RequestField(
        "num_speculative_tokens", Kind.INT, "Draft tokens a step, 0 to 7 (default: the setting of that name)."
    ),
    RequestField("num_draft_tokens", Kind.INT, "Same as `num_speculative_tokens`."),
    RequestField(
        "proposer",
        Kind.TEXT,
        "Proposers of tokens: none, eagle3, lookup or lookup+eagle3, as far as the server has them (default: all).",
    ),
    RequestField("priority", Kind.INT, "Higher runs first and is preempted last (default 0)."),
    RequestField("timeout_s", Kind.FLOAT, "Seconds after which the request is cancelled."),
    RequestField("cache_salt", Kind.TEXT, "Requests share cached prefixes only with requests of the same salt."),
    RequestField(
        "response_format",
        Kind.JSON,
        'Form of the reply: {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": …}} or "text".',
    ),
    RequestField(
        "structured_outputs",
        Kind.JSON,
        "The same as vLLM says it: a JSON object with one of json, regex, choice, grammar, json_object.",
    ),
    RequestField("tools", Kind.JSON, "JSON list of tools for the chat template."),
    RequestField(
        "tool_choice",
        Kind.JSON,
        'auto (default), none, required, or {"type": "function", "function": {"name": …}}: the reply is calls then.',
    ),
    RequestField("parallel_tool_calls", Kind.BOOL, "Forced calls may be several (default true)."),
    RequestField("chat_template_kwargs", Kind.JSON, 'JSON object for the chat template, such as {"thinking": false}.'),
    RequestField(
        "thinking_token_budget",
        Kind.INT,
        "Most tokens of thoughts, where the prompt ends inside a think block; the next one ends it.",
    ),
    RequestField("echo", Kind.BOOL, "The text begins with that of the prompt (default false)."),
    RequestField("return_token_ids", Kind.BOOL, "Send `output_ids` and `prompt_token_ids` too (default false)."),
    RequestField("return_token_origins", Kind.BOOL, "Send `token_origins` and `token_offsets` too (default false)."),
    RequestField(
        "return_control_offsets", Kind.BOOL, "Send `control_offsets` and `begins_thinking` too (default false)."
    ),
    RequestField(
        "return_round_times",
        Kind.INT,
        "Most rounds whose times `statistics` has, evenly spread over the reply; 0 to 64 (default 0).",
    ),
    RequestField(
        "return_step_costs",
        Kind.BOOL,
        "Send in `statistics` what steps cost, which k is chosen by (default false).",
    ),
    RequestField("return_num_input_tokens", Kind.BOOL, "Accepted for compatibility: the number is always sent."),
    RequestField("return_num_output_tokens", Kind.BOOL, "Accepted for compatibility: the number is always sent."),
    RequestField("exclude_input_in_output", Kind.BOOL, "Must be true where given: the prompt is never repeated."),
    RequestField("min_length", Kind.INT, "Same as `min_tokens`."),
    RequestField("sampling_parameters", Kind.JSON, "JSON object holding any of these fields."),
)

ALIASES = {"stop_words": "stop", "num_draft_tokens": "num_speculative_tokens", "min_length": "min_tokens"}

IGNORED_PARAMETERS = frozenset(
    {"id", "sequence_id", "sequence_start", "sequence_end", "binary_data_output", "timeout", "headers"}
)
"""Request parameters that clients and the server set on their own; `triton_*` likewise."""


def is_servers_own(parameter: str) -> bool:
    """Tell whether it is none of ours to read."""
    return parameter in IGNORED_PARAMETERS or parameter.startswith("triton_")


UNSUPPORTED_FIELDS = {
    "n": 1,
    "best_of": 1,
    "beam_width": 1,
    "num_return_sequences": 1,
    "use_beam_search": False,
    "lora_name": None,
}
"""Known elsewhere, not here: name -> the only value accepted."""

REMOVED_FIELDS = {"draft_sampling": "leave it out: a draft always draws with the target's noise"}
"""Known before -> what to do instead, for the message that refuses it."""

ELSEWHERE = {
    "prompt": "text_input",
    "prompt_token_ids": "input_ids",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "request_output_len": "max_tokens",
    "random_seed": "seed",
    "top_logprobs": "logprobs",
    "return_log_probs": "logprobs",
    "max_time": "timeout_s",
}
"""The name that other servers give a field -> its name here, for the message that refuses it."""


@dataclass(frozen=True, slots=True)
class ResponseField:
    name: str
    data_type: str
    dims: str
    meaning: str


OUTPUT_FIELDS = (
    ResponseField("text_output", "TYPE_STRING", "[ 1 ]", "Text added since the last response."),
    ResponseField(
        "finish_reason", "TYPE_STRING", "[ 1 ]", "stop, length or cancelled in the last response, else empty."
    ),
    ResponseField(
        "stop_reason", "TYPE_STRING", "[ 1 ]", "The stop text or token id that matched, or why it was cancelled."
    ),
    ResponseField("num_input_tokens", "TYPE_UINT32", "[ 1 ]", "Prompt tokens in the first response, 0 in others."),
    ResponseField("num_output_tokens", "TYPE_UINT32", "[ 1 ]", "Tokens added since the last response."),
    ResponseField("output_ids", "TYPE_INT32", "[ -1 ]", "Their ids, where `return_token_ids` asked for them."),
    ResponseField(
        "prompt_token_ids", "TYPE_INT32", "[ -1 ]", "The prompt's, in the first response, where asked for likewise."
    ),
    ResponseField(
        "token_origins",
        "TYPE_INT32",
        "[ -1 ]",
        "Where `return_token_origins` asked for it: for each token 0 where the target drew what nobody had guessed, 1"
        " where it was accepted from the draft, 2 where from what stood in the text before.",
    ),
    ResponseField(
        "token_offsets",
        "TYPE_INT32",
        "[ -1 ]",
        "Where asked for likewise: for each token the characters of the whole text before its own. Text that may become"
        " a stop text is sent later than its token.",
    ),
    ResponseField(
        "control_offsets",
        "TYPE_INT32",
        "[ -1 ]",
        "Where `return_control_offsets` asked for it: for each control token that shows in the text, such as"
        " `</think>`, the characters of the whole text before it. The same letters anywhere else are text.",
    ),
    ResponseField(
        "begins_thinking",
        "TYPE_BOOL",
        "[ 1 ]",
        "In the first response, where asked for likewise: the prompt ends inside a `<think>` block.",
    ),
    ResponseField(
        "logprobs",
        "TYPE_STRING",
        "[ 1 ]",
        "JSON list, where `logprobs` asked for it: token, token_id, logprob and the most likely `top` of each token.",
    ),
    ResponseField(
        "prompt_logprobs",
        "TYPE_STRING",
        "[ 1 ]",
        "JSON list in the first response, where `prompt_logprobs` asked for it: the same of each prompt token and its"
        " `rank` among all tokens, which is 1 for the most likely one. The first token's logprob and rank are null.",
    ),
    ResponseField(
        "statistics", "TYPE_STRING", "[ 1 ]", "JSON object in the last response, else empty: usage, times, speculation."
    ),
)
