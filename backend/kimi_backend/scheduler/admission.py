"""Is a request one that can be served? Every range is checked here, once, before anything is queued."""

import math
from dataclasses import dataclass

from kimi_backend.errors import InvalidRequestError
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.proposer import Proposer
from kimi_backend.types.request import MAX_ROUND_TIMES, GenerateRequest, SamplingParams

MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 2**18
"""Log-probabilities of one prompt: its tokens and the most likely ones beside each. They are
answered at once: some 20 MB of JSON."""
MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64
MAX_LOGIT_BIASES = 4096
MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """The most that the models behind this engine can take."""

    vocab_size: int
    max_model_len: int
    max_sequence_slots: int
    """KV slots of the smaller pool: a longer sequence could never run."""
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that leaves room for one output token."""
        return min(self.max_model_len, self.max_sequence_slots) - 1


def check_request(request: GenerateRequest, limits: AdmissionLimits, settings: SchedulerSettings) -> None:
    """Pass silently if the request can be served.

    Raises:
        InvalidRequestError: names the field, what was given and what is allowed.
    """
    prompt = request.prompt_token_ids
    if not prompt:
        raise InvalidRequestError("prompt: empty, at least 1 token is needed")
    check_prompt_length(len(prompt), limits.max_prompt_tokens)
    _check_token_ids("prompt", prompt, limits.vocab_size)
    if request.num_speculative_tokens is not None:
        _check_range("num_speculative_tokens", request.num_speculative_tokens, 0, settings.max_speculative_tokens)
    if request.proposer is not None and not request.proposer.is_part_of(settings.proposer):
        allowed = ", ".join(proposer.value for proposer in Proposer.parts_of(settings.proposer))
        raise InvalidRequestError(f"proposer: {request.proposer.value} given, one of {allowed} is allowed")
    _check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_range("return_round_times", request.return_round_times, 0, MAX_ROUND_TIMES)
    if request.timeout_s is not None and not request.timeout_s > 0:
        raise InvalidRequestError(f"timeout_s: {request.timeout_s} given, more than 0 seconds is allowed")
    check_sampling(request.sampling, limits.vocab_size)
    _check_prompt_logprobs(request.sampling.prompt_logprobs, len(prompt))
    _check_some_token_is_left(request.sampling, limits)


def check_prompt_length(num_tokens: int, most: int, *, is_beginning: bool = False) -> None:
    """
    Args:
        is_beginning: there may be more of them.

    Raises:
        InvalidRequestError: they are more than a prompt may have.
    """
    if num_tokens > most:
        raise InvalidRequestError(
            f"prompt: {num_tokens} {'or more ' if is_beginning else ''}tokens given, at most {most} are allowed,"
            " so that the prompt and one output token fit"
        )


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Pass silently if every parameter is in range.

    Raises:
        InvalidRequestError: names the field, what was given and what is allowed.
    """
    _check_range("temperature", params.temperature, 0, math.inf)
    _check_range("top_k", params.top_k, 0, 2**31 - 1)
    _check_positive("top_p", params.top_p, 1)
    _check_range("min_p", params.min_p, 0, 1)
    if params.seed is not None:
        _check_range("seed", params.seed, 0, 2**64 - 1)
    # Further out a logit times or over it may no longer be finite.
    _check_range("repetition_penalty", params.repetition_penalty, 0.01, 100)
    _check_range("frequency_penalty", params.frequency_penalty, -2, 2)
    _check_range("presence_penalty", params.presence_penalty, -2, 2)
    _check_range("min_tokens", params.min_tokens, 0, 2**31 - 1)
    if params.max_tokens is not None:
        _check_range("max_tokens", params.max_tokens, 0, 2**31 - 1)
        if params.min_tokens > params.max_tokens:
            raise InvalidRequestError(
                f"min_tokens: {params.min_tokens} given, at most max_tokens ({params.max_tokens}) is allowed"
            )
    for name in ("logprobs", "prompt_logprobs"):
        if (num_top := getattr(params, name)) is not None:
            _check_range(name, num_top, 0, min(MAX_LOGPROBS, vocab_size))
    if params.grammar is not None and params.ignore_eos:
        raise InvalidRequestError(f"ignore_eos: true given, false is allowed beside {params.grammar.field}")
    _check_logit_bias(params.logit_bias, vocab_size)
    _check_bad_words(params.bad_words, vocab_size)
    _check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_token_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    if len(params.stop) > MAX_STOP_STRINGS or "" in params.stop:
        raise InvalidRequestError(
            f"stop: {len(params.stop)} strings given, at most {MAX_STOP_STRINGS} non-empty ones are allowed"
        )


def _check_prompt_logprobs(num_top: int | None, num_tokens: int) -> None:
    if num_top is not None and num_tokens * (1 + num_top) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"prompt_logprobs: {num_top} given for {num_tokens} tokens, which are {num_tokens * (1 + num_top)}"
            f" log-probabilities with the tokens' own; at most {MAX_PROMPT_LOGPROBS} are allowed"
        )


def _check_some_token_is_left(params: SamplingParams, limits: AdmissionLimits) -> None:
    """Bad words of several tokens can still leave none later on; that request fails then, by its row's status."""
    banned = {word[0] for word in params.bad_words if len(word) == 1}
    what = "a bad word"
    if params.min_tokens:
        banned.update(params.stop_token_ids, () if params.ignore_eos else limits.eos_token_ids)
        what = "a bad word, or a stop token before min_tokens"
    if params.thinking_budget is not None and params.thinking_budget.end_token_id in banned:
        raise InvalidRequestError(f"thinking_token_budget: the token that ends thoughts may not be {what}")
    field, allowed = "allowed_token_ids", set(params.allowed_token_ids)
    if not allowed and len(banned) >= limits.vocab_size:
        field, allowed = "stop_token_ids" if params.min_tokens else "bad_words", set(range(limits.vocab_size))
    if allowed and allowed <= banned:
        raise InvalidRequestError(f"{field}: each token that may come is {what}; one that is none is needed")


def _check_logit_bias(bias: dict[int, float], vocab_size: int) -> None:
    if len(bias) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(f"logit_bias: {len(bias)} entries given, at most {MAX_LOGIT_BIASES} are allowed")
    _check_token_ids("logit_bias", tuple(bias), vocab_size)
    for token_id, value in bias.items():
        _check_range(f"logit_bias[{token_id}]", value, -100, 100)


def _check_bad_words(words: tuple[tuple[int, ...], ...], vocab_size: int) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequestError(f"bad_words: {len(words)} words given, at most {MAX_BAD_WORDS} are allowed")
    for index, word in enumerate(words):
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(
                f"bad_words[{index}]: {len(word)} tokens given, 1 to {MAX_BAD_WORD_TOKENS} are allowed"
            )
        _check_token_ids(f"bad_words[{index}]", word, vocab_size)


def _check_token_ids(field: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise InvalidRequestError(f"{field}: token id {wrong} given, 0 to {vocab_size - 1} is allowed")


def _check_range(field: str, value: float, low: float, high: float) -> None:
    # The comparison is written so that NaN fails it. Infinity is never a parameter, whatever the upper bound.
    if not low <= value <= high or math.isinf(value):
        allowed = f"a finite number of at least {low}" if math.isinf(high) else f"{low} to {high}"
        raise InvalidRequestError(f"{field}: {value} given, {allowed} is allowed")


def _check_positive(field: str, value: float, high: float) -> None:
    if not 0 < value <= high:
        raise InvalidRequestError(f"{field}: {value} given, above 0, up to {high} is allowed")
