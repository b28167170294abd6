"""Every field of a request body: taken, ignored, or refused. docs/openai.md lists the same, written from here.

Types are checked here; ranges are the server's to check, which names the field too.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

Int = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Choices = Annotated[int, Field(ge=1, le=16)]
MOST_NUMBER = 3e38
Number = Annotated[float, Field(ge=-MOST_NUMBER, le=MOST_NUMBER)]


# What /openapi.json says where errors are better told by ourselves.
_TOKEN_IDS: JsonDict = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
}
_PROMPT: JsonDict = {
    "anyOf": [
        {"type": "string"},
        _TOKEN_IDS,
        {"type": "array", "minItems": 1, "items": {"type": "string"}},
        {"type": "array", "minItems": 1, "items": _TOKEN_IDS},
    ]
}
_MESSAGES: JsonDict = {
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": ["system", "user", "assistant", "tool"]},
            "content": {"type": ["string", "array", "null"]},
        },
    },
}


def _at_most(count: int) -> BeforeValidator:
    """The server's own limit of the field, here before each of them is looked at and sent."""

    def check(value: Any) -> Any:
        if isinstance(value, (list, dict)) and len(value) > count:
            raise PydanticCustomError("too_many", "At most {count} of them are allowed", {"count": count})
        return value

    return BeforeValidator(check)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _up_to_the_first_wrong(value: Any) -> Any:
    """An object whose values are numbers as it is; else an entry that is wrong, so that one error is made and not an
    error of each."""
    entries = value.items() if isinstance(value, dict) else ()
    wrong = next(((key, number) for key, number in entries if not _is_small_number(number)), None)
    return value if wrong is None else dict([wrong])


def _is_small_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MOST_NUMBER


Texts = Annotated[list[str], Field(fail_fast=True), BeforeValidator(_listed), _at_most(1024)]
StopTokens = Annotated[list[Int], Field(fail_fast=True), _at_most(4096)]
AllowedTokens = Annotated[list[Int], Field(fail_fast=True)]
Biases = Annotated[dict[str, Number], BeforeValidator(_up_to_the_first_wrong), _at_most(16_384)]
Messages = Annotated[list[Any], _at_most(4096)]
Tools = Annotated[list[Any], _at_most(1024)]


def _taken(meaning: str, **schema: Any) -> Any:
    """schema: what /openapi.json says besides, such as a range that the server checks."""
    return Field(default=None, description=meaning, json_schema_extra=schema or None)


def _extension(meaning: str, **schema: Any) -> Any:
    """A field that is not OpenAI's; named as in vLLM where it has one. schema: as in `_taken`."""
    return _taken(meaning, is_extension=True, **schema)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class Thinking(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["enabled", "disabled"]


class GenerationRequest(BaseModel):
    """The fields that both endpoints take. None: not given."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = _taken("One of the served names (`--model-name`), else 404; default: the first.")
    max_tokens: Int | None = _taken(
        "Most output tokens. Default: 16 for a completion; for a chat the server's.", minimum=0
    )
    temperature: Number | None = _taken("0 is greedy (default 1).", minimum=0)
    top_p: Number | None = _taken(
        "Keep the most likely tokens up to this mass (default 1).", exclusiveMinimum=0, maximum=1
    )
    seed: Seed | None = _taken(
        "Same seed, same text; `statistics.seed` of the reply has the one that was used, -1 as 2^64 - 1."
    )
    stop: Texts | None = _taken("Up to 16 texts that end the output; not part of it.", maxItems=16)
    presence_penalty: Number | None = _taken("-2 to 2 (default 0).", minimum=-2, maximum=2)
    frequency_penalty: Number | None = _taken("-2 to 2 (default 0).", minimum=-2, maximum=2)
    logit_bias: Biases | None = _taken("Token id -> number from -100 to 100.")
    response_format: dict[str, Any] | None = _taken(
        '{"type": "json_object"}, or "json_schema" with a schema that the reply then fits; "text" is anything.'
    )
    stream: bool | None = _taken("Server-sent events instead of one body (default false).")
    stream_options: StreamOptions | None = _taken(
        "`include_usage`: one more chunk with the usage; `continuous_usage_stats` ⁺: what was used so far in each."
    )
    n: Choices | None = _taken("Choices of each prompt, 1 to 16; choice i draws with `seed` + i (default 1).")

    top_k: Int | None = _extension("Keep the k most likely tokens.", minimum=-1)
    min_p: Number | None = _extension("Keep tokens at least this likely, relative to the best.", minimum=0, maximum=1)
    repetition_penalty: Number | None = _extension("0.01 to 100 (default 1).", minimum=0.01, maximum=100)
    min_tokens: Int | None = _extension("No stop token before this many.", minimum=0)
    stop_token_ids: StopTokens | None = _extension("Tokens that end the output.")
    allowed_token_ids: AllowedTokens | None = _extension("Only these tokens may come.", minItems=1)
    bad_words: Texts | None = _extension("Texts that may not appear.")
    ignore_eos: bool | None = _extension("Do not stop at the end-of-sequence token.")
    include_stop_str_in_output: bool | None = _extension("Keep the stop text.")
    skip_special_tokens: bool | None = _extension("Leave special tokens out of the text (default true).")
    structured_outputs: dict[str, Any] | None = _extension(
        "One of json, regex, choice, grammar (EBNF) and json_object: what the reply follows."
    )
    num_speculative_tokens: Int | None = _extension("Draft tokens a step, 0 to 7.", minimum=0, maximum=7)
    proposer: str | None = _extension("Who proposes tokens: none, eagle3, lookup or lookup+eagle3.")
    cache_salt: str | None = _extension("Cached prefixes are shared only with requests of the same salt.")
    priority: Int | None = _extension("Higher runs first (default 0).")
    timeout_s: Number | None = _extension(
        "Seconds after which the request ends with an error (408).", exclusiveMinimum=0
    )
    prompt_logprobs: Int | None = _extension(
        "Log-probabilities of the prompt's tokens and of this many most likely ones; not in a stream.",
        minimum=0,
        maximum=20,
    )
    return_token_ids: bool | None = _extension("Adds `token_ids` to the choice and `prompt_token_ids` to the reply.")
    return_token_origins: bool | None = _extension("Adds `text_origins` to the choice: who said which text first.")


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    messages: Messages = Field(
        description="Rendered by the checkpoint's chat template on the server; text parts only.",
        json_schema_extra=_MESSAGES,
    )
    max_completion_tokens: Int | None = _taken("Same as `max_tokens`; give one of them.", minimum=0)
    logprobs: bool | None = _taken("Log-probabilities of the tokens.")
    top_logprobs: Int | None = _taken(
        "And of this many most likely ones, 0 to 20; needs `logprobs`.", minimum=0, maximum=20
    )
    tools: Tools | None = _taken("Declared to the model by the chat template; its calls come as `tool_calls`.")
    tool_choice: Any = _taken(
        '"auto", "none", which declares no tools, "required", or a tool\'s name in an object: the reply is calls then.'
    )
    parallel_tool_calls: bool | None = _taken("false: the reply has one call at most (default true).")
    reasoning_effort: Literal["none", "low", "medium", "high"] | None = _taken(
        '"none" turns thinking off; "low" and "medium" are a `thinking_token_budget` of 1,024 and 8,192.'
    )
    thinking_token_budget: Int | None = _extension(
        "Most tokens of thoughts; then they are ended and content follows.", minimum=0
    )
    thinking: Thinking | None = _extension('{"type": "disabled"} turns thinking off, "enabled" on.')
    enable_thinking: bool | None = _extension("false turns thinking off, true on.")
    chat_template_kwargs: dict[str, Any] | None = _extension(
        'For the chat template, such as {"thinking": false}; what it does not read is refused.'
    )


class TokenizeRequest(BaseModel):
    """Body of /tokenize: a text, or a chat."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = _taken("As elsewhere.")
    prompt: str | None = _taken("A text.")
    messages: Messages | None = _taken("A chat, in place of a text.")
    tools: Tools | None = _taken("Declared in the chat.")
    chat_template_kwargs: dict[str, Any] | None = _taken("For the chat's template.")


class DetokenizeRequest(BaseModel):
    """Body of /detokenize."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = _taken("As elsewhere.")
    tokens: list[TokenId] = Field(description="Token ids, at least one.", min_length=1, fail_fast=True)


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    prompt: Any = Field(
        description="A text or a list of token ids; or a list of these, each a prompt of its own.",
        json_schema_extra=_PROMPT,
    )
    logprobs: Int | None = _taken(
        "Log-probabilities of the tokens and of this many most likely ones, 0 to 20.", minimum=0, maximum=20
    )
    echo: bool | None = _taken(
        "The text begins with that of the prompt (default false); `logprobs` then begin with its tokens."
    )


_WHO = "says who asks or why, which no text depends on"
_IMAGES = "images are not served"
IGNORED = {
    "user": _WHO,
    "safety_identifier": _WHO,
    "metadata": _WHO,
    "store": "nothing is stored",
    "service_tier": "there is one; `priority` orders requests",
    "prompt_cache_key": "prefixes are found by their content; `cache_salt` keeps them apart",
    "prompt_cache_retention": "blocks stay cached until their memory is needed",
    "verbosity": "the models know no such setting; say it in the prompt",
    "length_penalty": "concerns beam search, which is refused",
    "request_id": "the reply's X-Request-Id names the request",
    "kv_transfer_params": "one server holds all KV",
    "mm_processor_kwargs": _IMAGES,
    "media_io_kwargs": _IMAGES,
    "spaces_between_special_tokens": "the tokenizer puts none",
    "add_special_tokens": "the tokenizer adds none, and the chat template writes its own",
}
"""Known, and taken without effect -> why. None of them can change the text here."""

NO_VALUE = object()

REFUSED: dict[str, Any] = {
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "modalities": ["text"],
    "audio": NO_VALUE,
    "functions": NO_VALUE,
    "function_call": NO_VALUE,
    "prediction": NO_VALUE,
    "web_search_options": NO_VALUE,
    "use_beam_search": False,
    "return_tokens_as_token_ids": False,
    "include_reasoning": True,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "chat_template": NO_VALUE,
    "documents": NO_VALUE,
    "truncate_prompt_tokens": NO_VALUE,
    "logits_processors": NO_VALUE,
    "vllm_xargs": NO_VALUE,
    "draft_sampling": NO_VALUE,
    "guided_json": NO_VALUE,
    "guided_regex": NO_VALUE,
    "guided_choice": NO_VALUE,
    "guided_grammar": NO_VALUE,
}
"""Known, not served: name -> the only value that is accepted, beside null."""

INSTEAD = {
    "best_of": "give n and choose",
    "suffix": "the models fill nothing in",
    "functions": "give tools",
    "return_tokens_as_token_ids": "give return_token_ids",
    "include_reasoning": "leave reasoning_content out where you show the reply",
    "add_generation_prompt": 'give "partial": true in the last message to continue it',
    "continue_final_message": 'give "partial": true in the last message',
    "chat_template": "the checkpoint's own is used",
    **{f"guided_{kind}": "give structured_outputs" for kind in ("json", "regex", "choice", "grammar")},
    "function_call": "give tool_choice",
    "draft_sampling": "leave it out: a draft always draws with the target's noise",
}
"""The suggestions of a refusal."""
