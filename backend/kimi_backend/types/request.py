"""A generation request and what comes back for it, as the engine sees them: token ids and parameters, no tensors."""

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING

from kimi_backend.types.grammar import Grammar
from kimi_backend.types.proposer import Proposer
from kimi_backend.types.step_costs import StepCosts

if TYPE_CHECKING:  # it imports numpy, which no `--help` waits for
    from kimi_backend.types.scoring import TokenScores

MAX_SPECULATIVE_TOKENS = 7
MAX_ROUND_TIMES = 64
"""The most rounds of one request whose times are kept."""


class TokenOrigin(IntEnum):
    """The source of a token. The target draws every token; a draft token that equals what it drew is accepted."""

    TARGET = 0
    """Nobody had proposed it."""
    DRAFT = 1
    """Accepted from the draft."""
    LOOKUP = 2
    """Accepted from what stood in the text before."""


class FinishReason(str, Enum):
    STOP = "stop"
    """A stop token, the end of sequence, or a stop string."""
    LENGTH = "length"
    """max_tokens, or the model's longest sequence."""
    CANCELLED = "cancelled"
    """The client, a deadline, or a shutdown."""
    ERROR = "error"


class EndCause(str, Enum):
    """The cause of a request's cancellation or failure, as an operator tells the cases apart."""

    CLIENT = "client"
    """Its client cancelled it or left."""
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"
    TARGET_LOST = "target_lost"
    BAD_LOGITS = "bad_logits"
    """Its logits were not finite."""
    NO_TOKEN_LEFT = "no_token_left"
    """Its own bans left no token to draw."""
    BAD_GRAMMAR = "bad_grammar"
    """Its grammar is none, or takes too much to compile or to match."""
    ENGINE_FAILED = "engine_failed"
    TEXT_FAILED = "text_failed"
    """Its tokens could not be turned into text."""


CANCEL_CAUSES = (EndCause.CLIENT, EndCause.DEADLINE, EndCause.SHUTDOWN)


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """The most tokens of thoughts, for a prompt that ends inside a think block."""

    num_tokens: int
    end_token_id: int
    """The token that ends the block. If it is not among the first num_tokens, it is the one behind them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Rules for drawing tokens and stopping. Ranges are checked where a request enters (`scheduler.admission`)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """uint64; None: the engine picks one and reports it."""
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that may not appear."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these tokens may be drawn; empty allows all."""
    min_tokens: int = 0
    max_tokens: int | None = None
    """None: up to the model's longest sequence."""
    thinking_budget: ThinkingBudget | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop_in_output: bool = False
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    ignore_eos: bool = False
    grammar: Grammar | None = None
    """The grammar that the text follows; it ends where the grammar does."""
    logprobs: int | None = None
    """None: none; n: the drawn token's logprob and the n most likely."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens, from the second on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One request, tokenised."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    num_speculative_tokens: int | None = None
    """0 to MAX_SPECULATIVE_TOKENS; None: the server's default."""
    proposer: Proposer | None = None
    """None: the server's default."""
    priority: int = 0
    """Higher runs first and is preempted last."""
    timeout_s: float | None = None
    """Seconds from arrival after which the request is cancelled."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    return_token_origins: bool = False
    """Deltas say who said each token first, and where its text begins."""
    return_round_times: int = 0
    """0 to MAX_ROUND_TIMES: the most rounds whose times the statistics have."""
    return_step_costs: bool = False
    """The statistics have what steps cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Raw log-probabilities at one emitted token."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), most likely first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """Counts of what speculation did for one request. A round is a verify that carried at least one draft token.

    Field names follow AIPerf's `speculative_decoding` object where it has one.
    """

    num_spec_steps: int = 0
    """Rounds."""
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = ()
    """[k + 1]: rounds that accepted exactly 0, 1, … k tokens."""
    drafted_per_position: tuple[int, ...] = ()
    """[k]: rounds that proposed that position."""
    accepted_per_position: tuple[int, ...] = ()
    """[k]: rounds that accepted that position."""

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted tokens a round: the tokens a target step yields. None when no round ran."""
        return 1 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens. None when nothing was drafted."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def acceptance_per_position(self) -> tuple[float | None, ...]:
        """Accepted / rounds that proposed it, for each position."""
        pairs = zip(self.accepted_per_position, self.drafted_per_position, strict=True)
        return tuple(accepted / drafted if drafted else None for accepted, drafted in pairs)


@dataclass(frozen=True, slots=True)
class RoundTime:
    """The times of one round of a request. A verify without draft tokens counts as one here."""

    round: int
    """The round's number, from 0 on; the step that draws the first token is none."""
    start_s: float
    """Seconds since the request's arrival when the round before had ended."""
    end_s: float
    """Seconds since the request's arrival when its tokens were there."""
    num_draft_tokens: int
    num_accepted_draft_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """Usage and timing of one finished request."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    max_tokens: int
    """Most output tokens that it could have: less than it asked for where the longest sequence ends before."""
    queue_time_s: float
    first_token_time_s: float | None
    """The time from arrival to the first token; None when none came."""
    total_time_s: float
    num_preemptions: int
    seed: int
    speculation: SpeculationStats | None
    """None when speculation did not run."""
    speculation_by_proposer: dict[str, SpeculationStats] = field(default_factory=dict)
    """`eagle3` or `lookup` -> its rounds, of those that had any. A grammar's own draft tokens count for whose they
    replace or follow."""
    proposer: str = ""
    """See `Proposer`: the request's, or the server's default."""
    speculation_policy: str = ""
    """The policy that chose the number of draft tokens: `adaptive` or `fixed`."""
    is_draft_there: bool = False
    """A draft was there when the request started, used or not."""
    num_draft_tokens_histogram: tuple[int, ...] = ()
    """[k + 1]: verifies that carried 0, 1, … k draft tokens; the step that drew the first token is none of them."""
    acceptance_problem: str | None = None
    """The fault that the server found with its acceptance before the request came; None while all is well."""
    synthetic_parts: tuple[str, ...] = ()
    """The things that were not real (`RunnerDescription.synthetic_parts`): text means nothing, times do."""
    round_times: tuple[RoundTime, ...] = ()
    """Times of up to `GenerateRequest.return_round_times` rounds, evenly spread over all of them."""
    step_costs: dict[str, StepCosts] = field(default_factory=dict)
    """`target`, `draft` -> the costs that k is chosen by, where `GenerateRequest.return_step_costs` asked for them and
    the policy has any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """The output that an engine step adds to a request. The last one carries finish_reason and stats, exactly once."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    token_origins: tuple[TokenOrigin, ...] = ()
    """One for each token, where the request asked for them."""
    token_offsets: tuple[int, ...] = ()
    """Characters of the request's whole text before its own, for each token, where asked for likewise."""
    control_offsets: tuple[int, ...] = ()
    """Characters of the request's whole text before each control token that shows in it."""
    matched_stop: str | int | None = None
    """The stop string or token id that ended the request."""
    error: str | None = None
    cause: EndCause | None = None
    """The cause of a cancellation or a failure."""
    stats: RequestStats | None = None
    prompt_scores: "TokenScores | None" = None
    """Scores of the prompt's tokens from the second on, where asked for: in the first delta."""
