"""The draft tokens that are worth their rows: the set that emits most tokens a second."""

from dataclasses import dataclass

import numpy as np

from kimi_backend.spec_decode.looked_up import Expected
from kimi_backend.spec_decode.round_times import RoundTimes
from kimi_backend.spec_decode.step_times import Floats, Ints

OTHERS_KEPT = 0.5
"""The share of tokens under verification that is expected of those that are not chosen here."""


@dataclass(frozen=True, slots=True)
class RowChoice:
    """The draft tokens of each of C sequences, and the speed with them."""

    num_draft_tokens: Ints
    """[C]"""
    tokens_per_s: float
    plain_tokens_per_s: float
    """If nobody drafted."""


@dataclass(frozen=True, slots=True)
class Batch:
    """All sequences of the next verify."""

    num_sequences: int
    num_proposed: int
    """Draft tokens that it checks in any case."""
    num_context_tokens: int
    is_drafting: bool
    """Some use the draft."""
    overlaps_next: bool
    """True if, with one row a sequence, it would be launched before the reply to the one before is there."""


def choose_more_rows(chances: Floats, batch: Batch, times: RoundTimes) -> Ints:
    """[C] how many of the tokens that cost a verify's rows and no draft's step are worth it.

    Args:
        chances: [C, K] of each to be kept, falling along a row; of C of the sequences.
    """
    num_seqs, num_others = batch.num_sequences, batch.num_proposed
    flat, most = chances.ravel(), chances.shape[1]
    order = np.argsort(-flat, kind="stable")[: int(np.count_nonzero(flat))]
    kept = np.concatenate([[0.0], flat[order].cumsum()])
    longest = np.concatenate([[0], np.maximum.accumulate(order % most) + 1])
    num_rows = num_seqs + num_others + np.arange(len(kept))
    longest = np.maximum(longest, -(-num_others // num_seqs)) + 1
    seconds = times.verifying(
        num_seqs,
        num_rows,
        longest,
        batch.num_context_tokens,
        is_drafting=batch.is_drafting,
        overlaps_next=batch.overlaps_next,
    )
    best = int(((num_seqs + OTHERS_KEPT * num_others + kept) / seconds).argmax())
    return np.bincount(order[:best] // most, minlength=len(chances))


def choose_rows(
    chances: Floats,
    num_seqs: int,
    num_context_tokens: int,
    times: RoundTimes,
    *,
    looked_up: Expected | None = None,
    least_gain: float = 1.0,
    finds_out: bool = False,
) -> RowChoice:
    """Take draft tokens by their chance to be kept, as long as the round's rate grows, for each depth of the draft.

    A sequence's chances fall from one position to the next, so what is taken of it are its first ones.

    Args:
        chances: [C, K] see `acceptance.chances`, of the sequences that may draft.
        num_seqs: all that run, C or more.
        looked_up: beside the draft and without it; None: nothing.
        least_gain: times as fast a round without a draft as one with it must be to be chosen.
        finds_out: rather than what is fastest, something in any case: that of which a token that is verified, and so
            tells how good the draft is, loses the fewest tokens beside a round without.
    """
    num_candidates, most = chances.shape
    if looked_up is None:
        plain = num_seqs / times.plain(num_seqs, num_context_tokens)
    else:
        shares = looked_up.shares
        share, num_tokens = 1 - float(np.prod(1 - shares)), float(shares @ looked_up.num_tokens)
        plain_s = times.plain(num_seqs, num_context_tokens, num_tokens, share)
        plain = (num_seqs + float(shares @ looked_up.num_kept)) / plain_s
    nothing = RowChoice(np.zeros(num_candidates, np.int64), plain, plain)
    flat = chances.ravel()
    order = (-flat).argsort(kind="stable")[: np.count_nonzero(flat)]
    if not len(order):
        return nothing
    sequence, position = np.divmod(order, most)
    is_first = position == 0
    # Row by row of [K, N], a depth of the draft and what it may take, in order: what is behind its depth adds nothing.
    depth = np.arange(1, int(position[position.argmax()]) + 2)[:, None]
    is_within = position < depth
    if looked_up is None:
        beside, more, more_rows, resting = (float(num_seqs), 0.0), flat[order], 1.0, None
    else:
        kept, rows, shares = looked_up.beside(chances)
        beside = num_seqs + float(kept[:, 0].sum()), float(rows[:, 0].sum())
        more, more_rows = (np.diff(found, axis=1).ravel()[order] for found in (kept, rows))
        resting = np.where(is_first, shares[sequence], 1.0).cumprod()
    emitted = (is_within * more).cumsum(axis=1) + beside[0]
    num_rows = (is_within * more_rows).cumsum(axis=1) + beside[1]
    seconds = times.drafting(
        num_seqs, is_first.cumsum(), depth, num_rows, emitted - num_seqs, num_context_tokens, resting
    )
    rates = emitted / seconds
    if finds_out:
        reached = np.concatenate([np.ones((num_candidates, 1)), chances[:, :-1]], axis=1).ravel()
        verified = (is_within * reached[order]).cumsum(axis=1)
        best = divmod(int(((emitted - plain * seconds) / verified).argmax()), len(order))
    else:
        best = divmod(int(rates.argmax()), len(order))
        if rates[best] <= plain / least_gain:
            return nothing
    row, last = best
    chosen = sequence[: last + 1][is_within[row, : last + 1]]
    return RowChoice(np.bincount(chosen, minlength=num_candidates), float(rates[best]), plain)
