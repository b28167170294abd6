"""One request on its way through the engine: its tokens, how much of their KV is valid, and when it ends."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from kimi_backend.cache.hash_chain import HashChain
from kimi_backend.cache.kv_manager import SequenceBlocks
from kimi_backend.grammar.window import SequenceGrammar, Window
from kimi_backend.scheduler.penalty_counts import PenaltyCounts
from kimi_backend.scheduler.prompt_scores import PromptScores
from kimi_backend.spec_decode.controller import SpeculationController
from kimi_backend.spec_decode.lookup import SequenceLookup
from kimi_backend.types.plan import Int32Array
from kimi_backend.types.proposer import Proposer
from kimi_backend.types.request import (
    MAX_SPECULATIVE_TOKENS,
    EndCause,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenOrigin,
)

MOST_UNREAD_TOKENS = 4 * (MAX_SPECULATIVE_TOKENS + 1)
"""More than the steps in flight and the next one can draw before the host has read any of it."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The reason why a sequence ended."""

    reason: FinishReason
    matched_stop: int | None = None
    error: str | None = None
    cause: EndCause | None = None
    """The cause of a cancellation or a failure."""


class DraftState(Enum):
    """The draft's part in a sequence."""

    AWAY = auto()
    """It was not there when the sequence last started."""
    OUT = auto()
    """It is there, and does not follow the sequence: k is 0, the policy chose so, or the sequence waits."""
    ON = auto()
    """Its KV follows the sequence. Only a running one."""
    NEVER = auto()
    """It failed for this sequence, which goes on without."""


class Sequence:
    """Owned by the engine thread. A running sequence has a table row and blocks; a waiting one has neither.

    `target_len` and `draft_len` are valid KV lengths; `num_draft_tokens` are in flight behind the last token. For
    a sequence that uses the draft both lengths are equal between steps, but for the rows of a draft step that nobody
    has read yet.
    After a preemption all tokens are input again; the border between prompt and output stays where it was.
    """

    __slots__ = (
        "_allowed_mask",
        "_draws_plainly",
        "_thoughts_end_at",
        "_tokens",
        "arrival_s",
        "blocks",
        "chain",
        "deadline_s",
        "draft",
        "draft_len",
        "draft_origin",
        "draft_start",
        "finish",
        "first_scheduled_s",
        "grammar",
        "last_token_id",
        "lookup",
        "max_num_tokens",
        "num_cached_tokens",
        "num_draft_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "order",
        "params",
        "penalties",
        "proposer",
        "request",
        "row",
        "scores",
        "seed",
        "speculation",
        "stop_token_ids",
        "target_len",
        "uid",
        "window",
    )

    def __init__(
        self,
        request: GenerateRequest,
        *,
        uid: int,
        seed: int,
        arrival_s: float,
        num_speculative_tokens: int,
        max_num_tokens: int,
        eos_token_ids: frozenset[int],
        proposer: Proposer = Proposer.EAGLE3,
    ) -> None:
        """
        Args:
            uid: arrival order, never used twice.
            seed: uint64, the request's or the engine's choice.
            num_speculative_tokens: k, resolved.
            proposer: resolved.
            max_num_tokens: prompt and output at most, within max_model_len.
        """
        params = request.sampling
        self.request = request
        self.params: SamplingParams = params
        self.uid = uid
        self.order = (-request.priority, uid)
        self.seed = seed
        self.arrival_s = arrival_s
        self.deadline_s = None if request.timeout_s is None else arrival_s + request.timeout_s
        self.max_num_tokens = max_num_tokens
        self.stop_token_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self.speculation = SpeculationController(num_speculative_tokens, params.temperature)
        self.proposer = proposer
        self.lookup: SequenceLookup | None = None
        """The index of its tokens, before it is queued; None where nothing is looked up, or there was no memory."""
        self.draft = DraftState.AWAY
        prompt = np.array(request.prompt_token_ids, np.int32)
        self._tokens = np.empty(min(max_num_tokens, len(prompt) + 256) + 1, np.int32)
        self._tokens[: len(prompt)] = prompt
        self.num_prompt_tokens = self.num_tokens = len(prompt)
        self.last_token_id: int = request.prompt_token_ids[-1]
        self.penalties = PenaltyCounts(prompt) if _uses_penalties(params) else None
        self._draws_plainly = self.penalties is None and not _wants_more(params)
        budget = params.thinking_budget
        self._thoughts_end_at = None if budget is None else len(prompt) + budget.num_tokens
        self.chain: HashChain | None = None  # kept while it waits, so that a prompt is hashed once
        self.blocks: SequenceBlocks | None = None
        self.scores = None if params.prompt_logprobs is None else PromptScores(len(prompt), params.prompt_logprobs)
        self.row = -1
        self.target_len = self.draft_len = 0
        self.draft_start = 0  # the position in the draft's slot 0
        self.num_draft_tokens = 0  # in flight: the next verify may check them
        self.draft_origin = TokenOrigin.DRAFT  # of those
        self.num_preemptions = 0
        self.first_scheduled_s: float | None = None
        self.num_cached_tokens: int | None = None  # at the first start
        self.finish: Finish | None = None
        self._allowed_mask: Int32Array | None = None
        self.grammar: SequenceGrammar | None = None
        """Its place in its grammar; set once that is compiled, before it is queued."""
        self.window: Window | None = None
        """The tokens that the next verify checks of a decoding sequence with a grammar."""

    @property
    def token_ids(self) -> Int32Array:
        """[num_tokens] prompt and output; a view."""
        return self._tokens[: self.num_tokens]

    @property
    def draws_plainly(self) -> bool:
        """A draw needs the logits, temperature, filters and seed alone, and gives a token alone."""
        return self._draws_plainly and not self.is_near_end_of_thoughts

    @property
    def is_near_end_of_thoughts(self) -> bool:
        """The budget of thoughts may be used up soon: the host must know each token, and each proposal, before the next
        step is planned."""
        ends_at = self._thoughts_end_at
        return ends_at is not None and ends_at <= self.num_tokens + MOST_UNREAD_TOKENS

    @property
    def needs_proposals(self) -> bool:
        """The host must know the draft's proposals before the next step is planned."""
        return self.grammar is not None or self.is_near_end_of_thoughts

    def forced_row(self, draft_token_ids: Int32Array) -> int | None:
        """The row of the next verify, if any, that must draw the end of the thoughts.

        A row is drawn for the case that all draft tokens before it are accepted, so its tokens before are known.

        Args:
            draft_token_ids: [k] what the next verify checks.
        """
        budget, ends_at = self.params.thinking_budget, self._thoughts_end_at
        if budget is None or ends_at is None:
            return None
        row = ends_at - self.num_tokens
        if row > len(draft_token_ids) or budget.end_token_id in draft_token_ids[:row]:
            return None
        return row

    @property
    def reads_prefix_cache(self) -> bool:
        """It may start with cached KV, but not while prompt tokens are to be scored."""
        return self.scores is None or self.scores.is_complete

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_num_tokens - self.num_tokens

    @property
    def is_decoding(self) -> bool:
        """Only the last token lacks KV: its row samples, and draft tokens may follow it."""
        return self.target_len == self.num_tokens - 1

    @property
    def is_filling(self) -> bool:
        """KV of known tokens is still being written, in either pool."""
        return not self.is_decoding or (self.uses_draft and self.draft_len < self.target_len)

    def will_publish(self, end: int, *, with_draft: bool) -> bool:
        """Its KV up to a position, in both pools where asked for, is not valid yet and will be."""
        if with_draft and (not self.uses_draft or self.draft_start):
            return False
        return self.target_len < end or (with_draft and self.draft_len < end)

    @property
    def publishable_draft_len(self) -> int:
        """Draft KV that others may share: only one that began with the sequence depends on its tokens alone."""
        return 0 if self.draft_start else self.draft_len

    @property
    def uses_draft(self) -> bool:
        """The draft's KV follows this sequence now."""
        return self.draft is DraftState.ON

    @property
    def wants_draft(self) -> bool:
        """The policy may choose it for the draft, once that is there."""
        may_draft = self.proposer.uses_draft and self.speculation.num_speculative_tokens > 0
        return may_draft and self.draft is not DraftState.NEVER

    @property
    def follows_a_match(self) -> bool:
        """The last verify checked what was looked up, and as far as the host knows the match goes on."""
        return self.draft_origin is TokenOrigin.LOOKUP and self.lookup is not None and self.lookup.is_following

    @property
    def most_draft_tokens(self) -> int:
        """Tokens that the host may propose for the next verify: no more than the request allows a draft."""
        return max(0, min(self.speculation.num_speculative_tokens, self.num_remaining_tokens - 1))

    def look_up_in(self, lookup: SequenceLookup | None) -> None:
        """Let the host propose what stood in its text before; None where there is no memory for that."""
        self.lookup = lookup
        if lookup is not None:
            self.speculation.repetition = lookup.repetition

    def append(self, token_ids: list[int]) -> int:
        """Add what a step emitted, up to and including the first stop token; sets `finish` when that ends it.

        Returns:
            How many of the tokens were kept.
        """
        stop_ids = self.stop_token_ids
        kept = len(token_ids)
        if not stop_ids.isdisjoint(token_ids):
            kept = next(index for index, token_id in enumerate(token_ids, 1) if token_id in stop_ids)
            self.finish = Finish(FinishReason.STOP, matched_stop=token_ids[kept - 1])
        if not kept:
            return 0
        start, end = self.num_tokens, self.num_tokens + kept
        assert end <= self.max_num_tokens, f"request {self.request.request_id}: {end} tokens, more than planned for"
        if end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(len(self._tokens), np.int32)])
        self._tokens[start:end] = token_ids if kept == len(token_ids) else token_ids[:kept]
        self.num_tokens = end
        self.last_token_id = token_ids[kept - 1]
        if self.penalties is not None:
            self.penalties.add_output(token_ids[:kept])
        if self.lookup is not None:
            self.lookup.extend(token_ids[:kept], self.token_ids)
        self.window = None
        if self.grammar is not None:
            self._follow(self.grammar, token_ids[:kept])
        budget = self.params.thinking_budget
        if budget is not None and budget.end_token_id in token_ids[:kept]:
            self._thoughts_end_at = None
        if end == self.max_num_tokens and self.finish is None:
            self.finish = Finish(FinishReason.LENGTH)
        return kept

    def _follow(self, grammar: SequenceGrammar, token_ids: list[int]) -> None:
        if not grammar.advance(token_ids):
            message = f"output token {self.num_output_tokens} does not follow the grammar"
            self.finish = Finish(FinishReason.ERROR, error=message, cause=EndCause.ENGINE_FAILED)
        elif grammar.is_too_slow and self.finish is None:
            assert self.params.grammar is not None
            message = f"{self.params.grammar.field}: takes too long to match, at output token {self.num_output_tokens}"
            self.finish = Finish(FinishReason.ERROR, error=message, cause=EndCause.BAD_GRAMMAR)

    def look_ahead(self, proposals: list[int]) -> list[int]:
        """The tokens of a decoding sequence with a grammar that the next verify checks: `window`, from proposals."""
        assert self.grammar is not None
        self.window = self.grammar.look_ahead(proposals, self.most_draft_tokens)
        return self.window.token_ids

    def grammar_masks(self, num_rows: int) -> list[Int32Array | None]:
        """[num_rows] what each of the next verify's rows may draw; None: all."""
        assert self.grammar is not None
        window = self.window if self.is_decoding and self.window is not None else self.grammar.look_ahead([], 0)
        return window.masks[:num_rows]

    def allowed_mask(self, num_words: int) -> Int32Array:
        """[num_words] int32: bit x % 32 of word x // 32 set for each x in `allowed_token_ids`."""
        if self._allowed_mask is None:
            self._allowed_mask = token_mask(self.params.allowed_token_ids, num_words)
        return self._allowed_mask


def token_mask(token_ids: Iterable[int], num_words: int) -> Int32Array:
    """[num_words] int32: bit x % 32 of word x // 32 set for each token x."""
    words = np.zeros(num_words, np.uint32)
    ids = np.array(tuple(token_ids), np.int64)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return words.view(np.int32)


def _wants_more(params: SamplingParams) -> bool:
    banned = params.bad_words or params.min_tokens or params.allowed_token_ids
    return bool(banned or params.logit_bias) or params.logprobs is not None


def _uses_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
