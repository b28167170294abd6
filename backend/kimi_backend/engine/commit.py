"""The meaning of a target step for its sequences: tokens kept, KV valid, who ended, and what the draft does next."""

from dataclasses import dataclass, field

import numpy as np

from kimi_backend.errors import KimiError
from kimi_backend.scheduler.plan_builder import emitted_tokens
from kimi_backend.scheduler.prompt_scores import scores_by_sequence
from kimi_backend.scheduler.scheduler import StepBatch
from kimi_backend.scheduler.sequence import Finish, Sequence
from kimi_backend.types.plan import (
    STATUS_NO_TOKEN_LEFT,
    STATUS_NOT_FINITE,
    FloatArray,
    Int64Array,
    TargetPlan,
    TargetReply,
)
from kimi_backend.types.request import EndCause, FinishReason, SamplingParams, TokenOrigin
from kimi_backend.types.scoring import TokenScores


@dataclass(slots=True)
class LogprobRows:
    """Log-probabilities of one sequence's emitted tokens, row by row."""

    logprobs: FloatArray
    top_ids: Int64Array
    top_logprobs: FloatArray


@dataclass(slots=True)
class StepOutput:
    """The tokens that a step gave one request: the unit that travels from the engine thread to the emitter."""

    sequence: Sequence
    time_s: float
    token_ids: list[int] = field(default_factory=list)
    """Kept tokens, a stop token included."""
    num_draft_tokens: int = 0
    """Draft tokens that the step verified."""
    num_accepted: int = 0
    draft_origin: TokenOrigin = TokenOrigin.DRAFT
    """The origin of those that were verified."""
    logprobs: LogprobRows | None = None
    prompt_scores: TokenScores | None = None
    finish: Finish | None = None
    """Set in a request's last output."""


def commit_step(
    batch: StepBatch, plan: TargetPlan, reply: TargetReply, time_s: float, still_there: list[bool]
) -> list[StepOutput]:
    """Append what was drawn, move the valid lengths, decide who ends.

    A sequence of n + 1 tokens that verified k draft tokens and had a accepted has KV for n + a + 1 of its n + a + 2
    tokens; a rejection only leaves the length lower than what was written. A failed row fails its sequence alone.

    Args:
        still_there: of each sequence; the step means nothing to one that is not.

    Returns:
        Of every sequence that drew a token or has ended.
    """
    outputs: list[StepOutput] = []
    emitted = iter(emitted_tokens(reply))
    status, num_sampled = reply.seq_status.tolist(), plan.num_sampled_rows.tolist()
    prompt_scores = _prompt_scores(batch, plan, reply)
    sample_index = 0
    for index, sequence in enumerate(batch.sequences):
        num_rows = batch.num_rows[index]
        is_sampling = num_sampled[index] > 0
        token_ids = next(emitted) if is_sampling else []
        if not still_there[index]:
            sample_index += is_sampling
            continue
        if (scores := prompt_scores[index]) is not None and not _keep_scores(sequence, scores):
            sequence.finish = _failed(sequence, STATUS_NOT_FINITE)
            outputs.append(StepOutput(sequence, time_s, finish=sequence.finish))
        elif is_sampling:
            output = _append(sequence, num_rows, num_sampled[index] - 1, token_ids, status[index], time_s)
            if reply.logprobs is not None:
                output.logprobs = _logprob_rows(sequence, reply, sample_index)
            if sequence.scores is not None:
                output.prompt_scores = sequence.scores.take()
            outputs.append(output)
        elif status[index] != 0:
            sequence.finish = _failed(sequence, status[index])
            outputs.append(StepOutput(sequence, time_s, finish=sequence.finish))
        else:
            sequence.target_len += num_rows
        sample_index += is_sampling
    return outputs


def _append(
    sequence: Sequence, num_rows: int, num_draft_tokens: int, token_ids: list[int], status: int, time_s: float
) -> StepOutput:
    """Give a sequence its tokens.

    Where the last row failed, the tokens accepted before it still count, as they would without speculation; if one of
    them ends the sequence, nobody needed the row. Rows of tokens that the draft failed to propose checked nothing.
    """
    window = sequence.window
    num_accepted = len(token_ids) - 1
    num_valid_rows = num_rows - num_draft_tokens + num_accepted
    if status != 0:
        token_ids = token_ids[:-1]
    if not sequence.num_remaining_tokens:  # a request for none: its prompt was all that it wanted
        token_ids, sequence.finish = [], Finish(FinishReason.LENGTH)
    num_kept = sequence.append(token_ids)
    if num_kept < len(token_ids):
        token_ids = token_ids[:num_kept]
    if status != 0 and sequence.finish is None:
        sequence.finish = _failed(sequence, status)
    sequence.target_len = min(sequence.target_len + num_valid_rows, sequence.num_tokens)
    num_proposed, sequence.num_draft_tokens = sequence.num_draft_tokens, 0
    num_drafted = num_proposed if window is None else window.num_drafted
    origin = sequence.draft_origin
    if sequence.lookup is not None and token_ids:
        num_checked = num_drafted if origin is TokenOrigin.LOOKUP else 0
        sequence.speculation.looked_up.end_verify(len(token_ids), sequence.lookup.num_found, num_checked)
    if num_drafted and origin is TokenOrigin.DRAFT:
        sequence.speculation.record(num_drafted, num_accepted)
    return StepOutput(sequence, time_s, token_ids, num_proposed, num_accepted, origin, finish=sequence.finish)


def _logprob_rows(sequence: Sequence, reply: TargetReply, index: int) -> LogprobRows | None:
    if sequence.params.logprobs is None or reply.logprobs is None:
        return None
    assert reply.top_logprob_ids is not None
    assert reply.top_logprobs is not None
    return LogprobRows(reply.logprobs[index], reply.top_logprob_ids[index], reply.top_logprobs[index])


def _prompt_scores(batch: StepBatch, plan: TargetPlan, reply: TargetReply) -> list[TokenScores | None]:
    if plan.scoring is None:
        return [None] * len(batch.sequences)
    if reply.scores is None or len(reply.scores) != len(plan.scoring.rows):
        given = None if reply.scores is None else len(reply.scores)
        raise KimiError(f"target replied with {given} scores, {len(plan.scoring.rows)} were asked")
    return scores_by_sequence(batch.sequences, plan.rows.query_lens, plan.scoring, reply.scores)


def _keep_scores(sequence: Sequence, scores: TokenScores) -> bool:
    """Add the scores of a chunk to a sequence's; false where one of its rows failed."""
    if np.isnan(scores.logprobs).any():
        return False
    assert sequence.scores is not None
    sequence.scores.add(scores)
    return True


def _failed(sequence: Sequence, status: int) -> Finish:
    """The end of a sequence whose row drew nothing: a request that bans every token is told from bad logits."""
    fields = banning_fields(sequence.params)
    if status == STATUS_NO_TOKEN_LEFT and fields:
        message = f"{', '.join(fields)}: no token is left to draw as output token {sequence.num_output_tokens + 1}"
        return Finish(FinishReason.ERROR, error=message, cause=EndCause.NO_TOKEN_LEFT)
    message = f"the model's logits were not finite (row status {status})"
    return Finish(FinishReason.ERROR, error=message, cause=EndCause.BAD_LOGITS)


def banning_fields(params: SamplingParams) -> list[str]:
    """The names of a request's fields that keep tokens from being drawn."""
    names = [name for name in ("allowed_token_ids", "bad_words", "min_tokens") if getattr(params, name)]
    return names if params.grammar is None else [params.grammar.field, *names]
