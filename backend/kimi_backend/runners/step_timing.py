"""Times a runner's decode steps over made-up sequences, for `types.step_costs`. It writes KV: before any real sequence.

Every shape is run with random tokens in all rows, at two contexts; a captured one with few live rows too. All shapes
are run in one pass after another, so that no shape has all its runs while other programs are busy. A GPU does not rest
meanwhile: rounds in service do not either, and at its power limit its clock is another.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from kimi_backend.runners.graphs.buckets import chosen_batch_sizes, query_lens
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.spec_decode.protocols import Pending
from kimi_backend.types.plan import AuxHandle, DraftPlan, RowPlan, SamplingPlan, TargetPlan
from kimi_backend.types.step_costs import StepCosts

Launch = Callable[[RowPlan, int], Pending[Any]]
"""Queues a step over rows; of a draft, with so many proposals of each sequence."""

SHORT_CONTEXT, LONG_CONTEXT = 64, 4096
"""Tokens of each sequence; less where the runner takes no such sequence."""
CPU_SIZES, CPU_QUERY_LENS = (1, 4, 16), (1, 2, 4, 8)
CPU_LONG_ROWS = 16
"""The most rows of a step over long contexts on a CPU: a key costs a row there as much with more of them."""
GPU_PASSES = 2
"""Passes from the smallest shape to the largest and back: a card's clock lags behind what its power limit allows, once
from above and once from below. More of them tell nothing that longer bursts do not."""
CPU_PASSES, MOST_CPU_PASSES = 4, 6
CPU_BUDGET_S = 1.0
"""Passes go on until they took so long, if there were enough."""
GPU_BUDGET_S = 4.0
"""All bursts of steps together, where steps are short. The power limit acts 0.7 s after a rest and settles half a
second later: no burst is as long, and what lasts is left to `spec_decode.round_times`."""
FEWEST_STEPS = 3
"""A burst of steps of one shape on a GPU; the second half of it counts, so two of these."""
CYCLES_A_SECOND = 2e9
"""The highest clock of any card."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A step that is timed."""

    num_seqs: int
    num_rows: int
    """Rows of each sequence; where it is not full, of the first one, and one of every other."""
    is_full: bool = True
    is_long: bool = False
    num_proposals: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Plans of made-up sequences."""

    pool: KvPool
    limits: RunnerLimits
    vocab_size: int
    is_draft: bool

    @property
    def most_proposals(self) -> int:
        """The most that are drawn for a sequence."""
        return self.limits.max_speculative_tokens if self.is_draft else 0

    def rows(self, shape: Shape) -> RowPlan:
        """The rows of a step."""
        lens = np.full(shape.num_seqs, shape.num_rows if shape.is_full else 1, np.int32)
        lens[0] = shape.num_rows
        context = self.contexts(shape.num_seqs)[shape.is_long]
        blocks = -(-(context + shape.num_rows + shape.num_proposals) // self.pool.block_size)
        table = np.arange(shape.num_seqs * blocks, dtype=np.int32) % self.pool.num_blocks
        return RowPlan(
            token_ids=np.random.default_rng(shape.num_seqs).integers(0, self.vocab_size, lens.sum(), np.int32),
            query_lens=lens,
            seq_lens=context + lens,
            block_table=table.reshape(shape.num_seqs, blocks),
        )

    def contexts(self, num_seqs: int) -> tuple[int, int]:
        """(short, long) for so many sequences, each in blocks of its own where the pool has them."""
        most_rows = self.limits.max_speculative_tokens + 1 + self.most_proposals
        room = self.limits.max_model_len - most_rows
        each = self.pool.num_blocks * self.pool.block_size // num_seqs - most_rows - self.pool.block_size
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
        sampling=_sampling(num_proposing),
        output_index=rows.seq_lens[:num_proposing].astype(np.int64) + 1,
        in_table=in_table,
    )


def _sampling(num_seqs: int) -> SamplingPlan:
    return SamplingPlan.plain(num_seqs, temperature=1.0)


def step_seconds(launch: Callable[[], Pending[Any]], device: torch.device, burst_s: float) -> float:
    """Seconds of a step: of one on a CPU; of those that a GPU runs in `burst_s`, the first few to know its length."""
    if device.type != "cuda":
        started_s = time.perf_counter()
        launch().wait()
        return time.perf_counter() - started_s
    step_s, pause_s = run_burst(launch, device, FEWEST_STEPS)
    num_left = round(burst_s / (step_s + pause_s)) - FEWEST_STEPS
    return step_s if num_left < FEWEST_STEPS else run_burst(launch, device, num_left)[0]


def run_burst(launch: Callable[[], Pending[Any]], device: torch.device, num_steps: int) -> tuple[float, float]:
    """Run steps one behind another on a GPU. Returns the seconds of one, by the second half, and of the pause before.

    A launch begins with a wait for the last upload of the step before, which for a draft is in its middle. The pause
    lasts as long as a launch, so that the next step is there before its time begins. The first run of a captured step
    takes longer, on the device and on the host: the shortest launch counts.
    """
    events, pause_s = [], math.inf
    for number in range(num_steps):
        if number:
            torch.cuda._sleep(round(pause_s * CYCLES_A_SECOND))  # type: ignore[no-untyped-call]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        started_s = time.perf_counter()
        pending = launch()
        pause_s = min(pause_s, time.perf_counter() - started_s)
        end.record()
        events.append((start, end))
    pending.wait()
    torch.cuda.synchronize(device)
    return 1e-3 * median(float(start.elapsed_time(end)) for start, end in events[num_steps // 2 :]), pause_s


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


def shapes_of(limits: RunnerLimits, *, is_captured: bool, is_draft: bool) -> list[Shape]:
    """All that are timed, the largest first."""
    shapes = []
    for size in reversed(sizes_of(limits, is_captured=is_captured)):
        lens = [n for n in query_lens_of(limits, is_captured=is_captured) if size * n <= limits.max_num_batched_tokens]
        one = int(is_draft)
        shapes += [Shape(size, length, num_proposals=one) for length in reversed(lens or [1])]
        if is_captured and size > 1:
            shapes += [Shape(size, length, is_full=False, num_proposals=one) for length in reversed(lens[1:])]
        longs = {1, _long_rows(lens, size, is_captured=is_captured)}
        shapes += [Shape(size, length, is_long=True, num_proposals=one) for length in sorted(longs, reverse=True)]
        most = limits.max_speculative_tokens if is_draft else 0
        counts = range(2, most + 1) if is_captured else sorted({most} - {0, 1})
        shapes += [Shape(size, 1, num_proposals=count) for count in [*reversed(counts), *[0] * is_draft]]
    return shapes


def _long_rows(lens: Sequence[int], size: int, *, is_captured: bool) -> int:
    """Rows of each sequence that are timed over long contexts beside one."""
    return max([length for length in lens if is_captured or size * length <= CPU_LONG_ROWS], default=1)


def time_steps(
    sequences: Sequences,
    launch: Launch,
    device: torch.device,
    advance: Callable[[int], None],
    *,
    is_captured: bool,
) -> tuple[StepCosts, float]:
    """Time every shape. Returns the costs, and of a CPU the share of its time that the process waited for a processor.

    Args:
        advance: called with 1 after each shape in each of the first `fewest_passes` passes.
    """
    shapes = shapes_of(sequences.limits, is_captured=is_captured, is_draft=sequences.is_draft)
    launches = {shape: partial(launch, sequences.rows(shape), shape.num_proposals) for shape in shapes}
    if not is_captured:
        for start in launches.values():  # kernels may have to be compiled
            start().wait()
    found: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    fewest, is_cpu = fewest_passes(device), device.type == "cpu"
    burst_s = GPU_BUDGET_S / (fewest * len(shapes))
    started, before = time.perf_counter(), scheduled_seconds()
    for number in range(MOST_CPU_PASSES):
        is_late = (time.perf_counter() - started) * (number + 1) / max(number, 1) > CPU_BUDGET_S
        if number >= fewest and (is_late or not is_cpu):
            break
        for shape in shapes if number % 2 else reversed(shapes):
            found[shape].append(step_seconds(launches[shape], device, burst_s))
            if number < fewest:
                advance(1)
    # On a CPU other programs only ever make a step longer.
    best = min if is_cpu else median
    us = {shape: 1e6 * best(seconds) for shape, seconds in found.items()}
    ran_s, waited_s = (after - first for after, first in zip(scheduled_seconds(), before, strict=True))
    share = waited_s / max(ran_s + waited_s, 1e-9) if is_cpu else 0.0
    return _costs(sequences, us, is_captured=is_captured), share


def fewest_passes(device: torch.device) -> int:
    """Return how often each shape is timed, at least."""
    return CPU_PASSES if device.type == "cpu" else GPU_PASSES


def scheduled_seconds() -> tuple[float, float]:
    """Seconds that this process's threads ran, and that they waited for a processor: 0 where the system tells none."""
    ran_ns = waited_ns = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            ran, waited, _ = path.read_text().split()
            ran_ns, waited_ns = ran_ns + int(ran), waited_ns + int(waited)
    return 1e-9 * ran_ns, 1e-9 * waited_ns


def _costs(sequences: Sequences, us: dict[Shape, float], *, is_captured: bool) -> StepCosts:
    """A draft's steps were timed with one proposal, so that they are captured ones: it is taken off them."""
    limits, most = sequences.limits, sequences.most_proposals
    sizes, lens = sizes_of(limits, is_captured=is_captured), query_lens_of(limits, is_captured=is_captured)
    one = int(most > 0)
    steps = [_row(us, size, lens, one) for size in sizes]
    if not is_captured:
        _bound_by_larger(steps)
    padded, context, row_context, proposals = [], list[float](), list[float](), []
    for size, row in zip(sizes, steps, strict=True):
        short, long = sequences.contexts(size)
        padded.append(
            [us.get(Shape(size, n, is_full=False, num_proposals=one), step) for n, step in zip(lens, row, strict=True)]
        )
        further_tokens = size * max(long - short, 1)
        of_token = {
            n: max(us[shape] - step, 0.0) / further_tokens
            for n, step in zip(lens, row, strict=True)
            if (shape := Shape(size, n, is_long=True, num_proposals=one)) in us
        }
        context.append(of_token[1])
        most_rows = max(of_token)
        if most_rows > 1:
            row_context.append(max(of_token[most_rows] - of_token[1], 0.0) / (most_rows - 1))
        else:
            row_context.append(row_context[-1] if row_context else 0.0)
        if not most:
            continue
        first_us = max(row[0] - us[Shape(size, 1)], 0.0)
        of_count = {n: us[Shape(size, 1, num_proposals=n)] for n in range(2, most + 1) if _drew(us, size, n)}
        further_us = [max(value - row[0], 0.0) for value in of_count.values()]
        drawn = np.interp(np.arange(1, most + 1), [1, *of_count], [0.0, *further_us])
        proposals.append((first_us + drawn).tolist())
        least_us = row[0] - first_us  # no step takes less, or it was timed while others were slow
        for timed in (row, padded[-1]):
            timed[:] = [max(value - first_us, least_us) for value in timed]
    return StepCosts(
        num_seqs=sizes,
        query_lens=lens,
        is_captured=is_captured,
        context_len=sequences.contexts(sizes[-1])[0] + 1,
        step_us=_tuples(steps),
        padded_us=_tuples(padded if is_captured else steps),
        context_us=tuple(context),
        row_context_us=tuple(row_context),
        proposals_us=_tuples(proposals) if most else (),
    )


def _drew(us: dict[Shape, float], size: int, num_proposals: int) -> bool:
    return Shape(size, 1, num_proposals=num_proposals) in us


def _row(us: dict[Shape, float], size: int, lens: tuple[int, ...], num_proposals: int) -> list[float]:
    """[q] of one number of sequences. More rows than a step may have run in none: they cost as much each."""
    row: list[float] = []
    for place, length in enumerate(lens):
        known = us.get(Shape(size, length, num_proposals=num_proposals))
        row.append(row[-1] * length / lens[place - 1] if known is None else known)
    return row


def _bound_by_larger(steps: list[list[float]]) -> None:
    """Let no step on a CPU take longer than one of more rows did."""
    for index in range(len(steps) - 1, -1, -1):
        row, larger = steps[index], steps[min(index + 1, len(steps) - 1)]
        for place in range(len(row) - 1, -1, -1):
            row[place] = min([row[place], larger[place], *row[place + 1 : place + 2]])


def _tuples(rows: list[list[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in rows)
