"""Times a runner's decode steps over made-up sequences, for `types.step_costs`. It writes KV: before any real sequence.

Every shape is run with random tokens in all rows, at two contexts; a captured one with few live rows too.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from kimi_backend.runners.graphs.buckets import chosen_batch_sizes, query_lens
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.spec_decode.protocols import Pending
from kimi_backend.types.plan import AuxHandle, DraftPlan, Int32Array, RowPlan, SamplingPlan, TargetPlan
from kimi_backend.types.step_costs import StepCosts

Launch = Callable[[], Pending[Any]]
Timed = tuple[list[float], list[float], float, list[float]]
"""Microseconds of one number of sequences: steps, padded steps, a token of context, proposals."""

SHORT_CONTEXT, LONG_CONTEXT = 64, 4096
"""Tokens of each sequence; less where the runner takes no such sequence."""
CPU_SIZES, CPU_QUERY_LENS = (1, 4, 16), (1, 2, 4, 8)
FEWEST_RUNS, MOST_RUNS, ENOUGH_S = 3, 10, 0.02
"""A shape is run until it took so long, but so often at least and at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Plans of made-up sequences."""

    pool: KvPool
    limits: RunnerLimits
    vocab_size: int

    def rows(self, query_lens: Int32Array, context: int, num_more: int = 0) -> RowPlan:
        """So many rows of each [S] behind `context` tokens; the blocks have room for `num_more` further ones."""
        num_seqs = len(query_lens)
        blocks = -(-(context + int(query_lens.max()) + num_more) // self.pool.block_size)
        table = np.arange(num_seqs * blocks, dtype=np.int32) % self.pool.num_blocks
        return RowPlan(
            token_ids=np.random.default_rng(num_seqs).integers(0, self.vocab_size, query_lens.sum(), np.int32),
            query_lens=query_lens,
            seq_lens=context + query_lens,
            block_table=table.reshape(num_seqs, blocks),
        )

    def contexts(self, num_seqs: int, most_rows: int) -> tuple[int, int]:
        """(short, long) for so many sequences, each in blocks of its own where the pool has them."""
        room = self.limits.max_model_len - 2 * most_rows
        each = self.pool.num_blocks * self.pool.block_size // num_seqs - 2 * most_rows - self.pool.block_size
        return min(SHORT_CONTEXT, room), max(min(LONG_CONTEXT, room, each), min(2 * SHORT_CONTEXT, room))


def target_plan(rows: RowPlan, *, wants_aux: bool) -> TargetPlan:
    """A verify of given tokens."""
    num_seqs = len(rows.query_lens)
    return TargetPlan.given(
        rows,
        step_id=1,
        num_sampled_rows=rows.query_lens,
        sampling=_sampling(num_seqs),
        num_logprobs=None,
        wants_aux=np.full(num_seqs, wants_aux),
    )


def draft_plan(rows: RowPlan, num_proposals: int, aux: AuxHandle, *, in_table: bool) -> DraftPlan:
    """An extension over given tokens, then the same number of proposals for all."""
    num_seqs = len(rows.query_lens)
    num_proposing = num_seqs if num_proposals else 0
    return DraftPlan.given(
        rows,
        np.full(num_seqs, num_proposals, np.int32),
        step_id=1,
        aux=aux,
        aux_rows=np.arange(len(rows.token_ids), dtype=np.int64),
        greedy=np.zeros(num_proposing, np.bool_),
        sampling=_sampling(num_proposing),
        output_index=rows.seq_lens[:num_proposing].astype(np.int64) + 1,
        in_table=in_table,
    )


def _sampling(num_seqs: int) -> SamplingPlan:
    return SamplingPlan.plain(num_seqs, temperature=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimer:
    """Times steps on one device."""

    device: torch.device
    advance: Callable[[int], None]
    """Called with 1 after each shape."""

    def us(self, launch: Launch) -> float:
        """Microseconds of a step: on a GPU of one behind another, as they are served; on a CPU of the fastest, because
        other programs only ever make it longer."""
        first = self._seconds(launch, 1)
        first = min(first, self._seconds(launch, 1))
        runs = int(min(max(ENOUGH_S / max(first, 1e-6), FEWEST_RUNS), MOST_RUNS))
        if self.device.type == "cuda":
            seconds = self._seconds(launch, runs) / runs
        else:
            seconds = min(self._seconds(launch, 1) for _ in range(runs))
        self.advance(1)
        return 1e6 * seconds

    def _seconds(self, launch: Launch, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            pending = launch()
        pending.wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start


def sizes_of(limits: RunnerLimits, *, is_captured: bool) -> tuple[int, ...]:
    """Numbers of sequences that are timed: those that steps are captured for."""
    if is_captured:
        return tuple(chosen_batch_sizes(limits.max_num_seqs, limits.capture_batch_sizes))
    return tuple(sorted({min(size, limits.max_num_seqs) for size in CPU_SIZES}))


def query_lens_of(limits: RunnerLimits, *, is_captured: bool) -> tuple[int, ...]:
    """Rows of each sequence that are timed."""
    longest = limits.max_speculative_tokens + 1
    if is_captured:
        return tuple(query_lens(longest))
    return tuple(sorted({min(length, longest) for length in CPU_QUERY_LENS}))


def num_timed_steps(limits: RunnerLimits, *, is_captured: bool, is_draft: bool) -> int:
    """How often `time_steps` advances."""
    sizes, lens = sizes_of(limits, is_captured=is_captured), query_lens_of(limits, is_captured=is_captured)
    return len(sizes) * (len(lens) + 1 + is_captured * (len(lens) - 1) + 2 * is_draft)


def time_steps(
    sequences: Sequences,
    timer: StepTimer,
    launch: Callable[[RowPlan, int], Pending[Any]],
    *,
    is_captured: bool,
    is_draft: bool,
) -> StepCosts:
    """Time every shape, the largest first.

    Args:
        launch: queues a step over rows; of a draft, with so many proposals.
    """
    limits = sequences.limits
    sizes = sizes_of(limits, is_captured=is_captured)
    lens = query_lens_of(limits, is_captured=is_captured)
    most = limits.max_speculative_tokens if is_draft else 0
    found = [_of_size(sequences, timer, launch, size, lens, most, is_captured=is_captured) for size in reversed(sizes)][
        ::-1
    ]
    if not is_captured:
        _bound_by_larger(found)
    return StepCosts(
        num_seqs=sizes,
        query_lens=lens,
        is_captured=is_captured,
        context_len=sequences.contexts(sizes[-1], lens[-1] + most)[0] + 1,
        step_us=tuple(tuple(item[0]) for item in found),
        padded_us=tuple(tuple(item[1] if is_captured else item[0]) for item in found),
        context_us=tuple(item[2] for item in found),
        most_proposals=most,
        proposals_us=tuple(tuple(item[3]) for item in found) if most else (),
    )


def _bound_by_larger(found: list[Timed]) -> None:
    """On a CPU other programs make a step longer, never shorter: it takes no longer than one of more rows did."""
    for index in range(len(found) - 1, -1, -1):
        steps = found[index][0]
        larger = found[index + 1][0] if index + 1 < len(found) else steps
        for place in range(len(steps) - 1, -1, -1):
            steps[place] = min([steps[place], larger[place], *steps[place + 1 : place + 2]])


def _of_size(
    sequences: Sequences,
    timer: StepTimer,
    launch: Callable[[RowPlan, int], Pending[Any]],
    num_seqs: int,
    lens: Iterable[int],
    most: int,
    *,
    is_captured: bool,
) -> Timed:
    lens = list(lens)
    short, long = sequences.contexts(num_seqs, lens[-1] + most)

    def us(most_rows: int, context: int, num_proposals: int = 0, *, is_full: bool = True) -> float:
        query_lens = np.full(num_seqs, most_rows if is_full else 1, np.int32)
        query_lens[0] = most_rows
        return timer.us(partial(launch, sequences.rows(query_lens, context, num_proposals), num_proposals))

    # More rows than a step may have run in none: they cost what the most that it may have cost.
    fitting = [length for length in lens if num_seqs * length <= sequences.limits.max_num_batched_tokens] or [1]
    steps = [us(length, short) for length in reversed(fitting)][::-1]
    steps += [steps[-1] * length / fitting[-1] for length in lens[len(fitting) :]]
    padded = steps.copy()
    if is_captured:
        padded[1 : len(fitting)] = [us(length, short, is_full=False) for length in fitting[1:]]
    at_length = us(1, long)
    context_us = max(at_length - steps[0], 0.0) / (num_seqs * max(long - short, 1))
    proposals = [max(us(1, short, count) - steps[0], 0.0) for count in (1, most)] if most else []
    return steps, padded, context_us, proposals
