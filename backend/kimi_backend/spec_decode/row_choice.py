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
    looked_up = looked_up or Expected.nothing(num_candidates)
    num_kept = num_seqs + looked_up.num_kept
    plain_s = times.plain(num_seqs, num_context_tokens, looked_up.num_tokens, looked_up.share)
    plain = num_kept / plain_s
    nothing = RowChoice(np.zeros(num_candidates, np.int64), plain, plain)
    flat = chances.ravel()
    order = np.argsort(-flat, kind="stable")[: int(np.count_nonzero(flat))]
    if not len(order):
        return nothing
    position = order % most
    # Row by row of these, a depth of the draft: what it may take, in order.
    is_within = position < np.arange(1, int(position.max()) + 2)[:, None]
    # A sequence that has a match in some rounds needs its draft tokens in the others.
    shares = 1 - looked_up.shares[order // most]
    kept = np.where(is_within, shares * flat[order], 0.0).cumsum(axis=1)[is_within]
    num_rows = np.where(is_within, shares, 0.0).cumsum(axis=1)[is_within]
    resting = np.where(is_within & (position == 0), 1 - shares, 1.0).cumprod(axis=1)[is_within]
    num_drafting = (is_within & (position == 0)).cumsum(axis=1)[is_within]
    depths, places = is_within.nonzero()
    seconds = times.drafting(
        num_seqs,
        num_drafting,
        depths + 1,
        num_rows + looked_up.num_tokens,
        kept + looked_up.num_kept,
        num_context_tokens,
        resting,
    )
    rates = (num_kept + kept) / seconds
    if finds_out:
        reached = np.concatenate([np.ones((num_candidates, 1)), chances[:, :-1]], axis=1).ravel()
        verified = np.where(is_within, shares * reached[order], 0.0).cumsum(axis=1)[is_within]
        best = int(((num_kept + kept - plain * seconds) / verified).argmax())
    else:
        best = int(rates.argmax())
        if rates[best] <= plain / least_gain:
            return nothing
    taken = order[: places[best] + 1]
    taken = taken[taken % most <= depths[best]]
    return RowChoice(np.bincount(taken // most, minlength=num_candidates), float(rates[best]), plain)
