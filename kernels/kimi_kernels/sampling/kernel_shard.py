# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""Sampling with the vocabulary cut over ranks: what each rank finds in its columns, and how that is put together.

Two small exchanges instead of gathering logits, [R, 4] candidates and then [R, 5] masses:

    mine = draw_shard(logits, inputs, rows, first_token_id)
    best = merge_candidates(all-gather of mine)                        # the same on every rank
    masses = shard_masses(logits, inputs, rows, first_token_id, best)  # all-reduce: sum
    result, is_open = finish_shards(inputs, rows, best, masses)

Rows with top-k, and those whose candidates all fall to the filters, stay open: their logits must be gathered and
sampled whole. Where no row filters, the masses need not be exchanged. Nothing here waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_kernels.argument_checks import require
from kimi_kernels.sampling.kernel_check import count_masses, store_masses
from kimi_kernels.sampling.kernel_launch import SamplingCall
from kimi_kernels.sampling.kernel_noise import inverse_temperature, min_weight
from kimi_kernels.sampling.weights_reference import weights_below
from kimi_kernels.sampling_inputs import (
    GREEDY_TEMPERATURE,
    PLACEHOLDER_TOKEN_ID,
    STATUS_NO_TOKEN_LEFT,
    STATUS_NOT_FINITE,
    STATUS_OK,
    SampleOutput,
    SamplingInputs,
    SamplingRows,
)

NO_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCandidates:
    """The best tokens of R rows by score, before any filter, best first, the lowest id first among equals."""

    scores: Tensor
    """[R, 4] float64; -inf where there is no token."""
    token_ids: Tensor
    """[R, 4] int64; NO_TOKEN_ID where there is none."""
    scaled: Tensor
    """[R, 4] float32: y of each."""
    largest: Tensor
    """[R] float32: largest y of the row's columns; NaN if a raw logit was NaN or +inf."""


@triton.jit
def mass_kernel(
    LOGITS,
    WORK,
    USES_WORK,
    SEQUENCE,
    TEMPERATURE,
    MIN_P,
    SCALED,
    LARGEST,
    PART_MASS,
    row_stride,
    num_columns,
    SPLITS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_WORK: tl.constexpr,
):
    """Integer masses of one split: all, and above each of four y.

    Args:
        as `check_kernel`; SCALED: [R, 4] float32, LARGEST: [R] float32, of the whole row. PART_MASS: [R, SPLITS, 5].
    """
    row = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    sequence = tl.load(SEQUENCE + row)
    uses_work = False
    if HAS_WORK:
        uses_work = tl.load(USES_WORK + row) != 0
    source = (LOGITS, WORK, LOGITS, row, row_stride, num_columns, uses_work)
    inverse = inverse_temperature(tl.load(TEMPERATURE + sequence))
    rules = (inverse, tl.load(LARGEST + row), min_weight(tl.load(MIN_P + sequence)))
    at = SCALED + row * 4
    candidates = (0, 0, 0, 0, tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3))
    start = split * SPLIT_COLUMNS
    stop = tl.minimum(start + SPLIT_COLUMNS, num_columns)
    masses = count_masses(source, start, stop, rules, candidates, BLOCKS, STAGES, EVEN, HAS_WORK)
    store_masses(PART_MASS + (row * SPLITS + split) * 5, masses)


def draw_shard(logits: Tensor, inputs: SamplingInputs, rows: SamplingRows, first_token_id: int) -> ShardCandidates:
    """The best tokens of this rank's columns.

    Args:
        logits: [R, columns of this rank] float32 or bf16: tokens first_token_id on.
        rows: its logit_mask, if any, covers the whole vocabulary.
        first_token_id: a multiple of 4, so that blocks of noise are whole.
    """
    require(first_token_id % 4 == 0, "first_token_id", first_token_id, "a multiple of 4")
    call = SamplingCall(logits, inputs, rows, None, first_token_id)
    call.process()
    call.draw()
    shape = (call.num_rows, -1)
    token_ids = call.part_token.view(shape).long()
    largest = _not_finite_as_nan(call)
    columns = (token_ids - first_token_id).clamp(0, call.num_columns - 1)
    processed = torch.where(call.uses_work_rows[:, None] != 0, call.work, logits.float()) if call.uses_work else logits
    temperature = inputs.temperature[rows.sequence]
    inverse = torch.ones_like(temperature) / temperature
    inverse = torch.where(temperature < GREEDY_TEMPERATURE, 1.0, inverse)
    scaled = processed.gather(1, columns).float() * inverse[:, None]
    return _best_four(call.part_score.view(shape), token_ids, scaled, largest)


def _not_finite_as_nan(call: SamplingCall) -> Tensor:
    is_bad = (call.part_bad.view(call.num_rows, -1).amax(dim=1) != 0) | (call.zeros[2, : call.num_rows] != 0)
    return torch.where(is_bad, float("nan"), call.part_best.view(call.num_rows, -1).amax(dim=1))


def _best_four(scores: Tensor, token_ids: Tensor, scaled: Tensor, largest: Tensor) -> ShardCandidates:
    """By score, then by id: two stable sorts."""
    token_ids = torch.where(scores > float("-inf"), token_ids, NO_TOKEN_ID)
    by_id = token_ids.argsort(dim=1, stable=True)
    order = by_id.gather(1, scores.gather(1, by_id).argsort(dim=1, descending=True, stable=True))[:, :4]
    return ShardCandidates(
        scores=scores.gather(1, order),
        token_ids=token_ids.gather(1, order),
        scaled=scaled.gather(1, order),
        largest=largest,
    )


def merge_candidates(shards: Sequence[ShardCandidates]) -> ShardCandidates:
    """Those of the whole vocabulary; the same on every rank, in whatever order the shards come."""
    return _best_four(
        torch.cat([shard.scores for shard in shards], dim=1),
        torch.cat([shard.token_ids for shard in shards], dim=1),
        torch.cat([shard.scaled for shard in shards], dim=1),
        torch.stack([shard.largest for shard in shards]).amax(dim=0),  # amax hands a NaN on
    )


def shard_masses(
    logits: Tensor, inputs: SamplingInputs, rows: SamplingRows, first_token_id: int, best: ShardCandidates
) -> Tensor:
    """This rank's share of the mass, and of the masses above each candidate.

    Returns:
        [R, 5] float64 holding integers, to be summed over the ranks; the sums are exact in any order.
    """
    call = SamplingCall(logits, inputs, rows, None, first_token_id)
    call.process()
    cut = {name: value for name, value in call.cut.items() if name != "SPLITS_P2"}
    mass_kernel[(call.num_rows * call.splits.count,)](
        logits,
        call.work,
        call.uses_work_rows,
        rows.sequence,
        inputs.temperature,
        inputs.min_p,
        best.scaled.contiguous(),
        best.largest,
        call.part_mass,
        logits.stride(0),
        call.num_columns,
        HAS_WORK=call.uses_work,
        enable_fp_fusion=False,
        **cut,
    )
    return call.part_mass.view(call.num_rows, call.splits.count, 5).sum(dim=1)


def finish_shards(
    inputs: SamplingInputs, rows: SamplingRows, best: ShardCandidates, masses: Tensor
) -> tuple[SampleOutput, Tensor]:
    """(tokens and statuses, [R] bool: rows that stay open and must be sampled whole).

    Args:
        masses: [R, 5] float64, summed over the ranks.
    """
    sequence = rows.sequence
    is_ok = best.largest.isfinite()
    is_greedy = inputs.temperature[sequence] < GREEDY_TEMPERATURE
    top_p = inputs.top_p[sequence, None].double()
    is_token = best.scores > float("-inf")
    weights = weights_below(torch.where(is_token, best.scaled - best.largest[:, None], 0.0)).double()
    above, limit = masses[:, 1:], top_p * masses[:, :1]
    survives = is_token & (weights >= inputs.min_p[sequence, None].double() * 2.0**31)
    survives &= (top_p >= 1.0) | (best.scaled >= best.largest[:, None]) | (above < limit)
    survives = torch.where(is_greedy[:, None], is_token, survives & (inputs.top_k[sequence, None] <= 0))
    first = survives.to(torch.int32).argmax(dim=1, keepdim=True)
    is_found = survives.any(dim=1)
    token_ids = torch.where(is_ok & is_found, best.token_ids.gather(1, first)[:, 0], PLACEHOLDER_TOKEN_ID)
    failure = torch.where(best.largest == float("-inf"), STATUS_NO_TOKEN_LEFT, STATUS_NOT_FINITE)
    status = torch.where(is_ok, STATUS_OK, failure).to(torch.int32)
    return SampleOutput(token_ids=token_ids, status=status), is_ok & ~is_found
