"""The static arrays of a step depend on its plan alone, whatever the step before has left in them."""

from collections.abc import Callable

import numpy as np
import pytest

from kimi_backend.runners.graphs.buckets import Bucket
from kimi_backend.runners.graphs.chunk_parts import ChunkParts
from kimi_backend.runners.graphs.draft_inputs import extension_layout, fill_extension, fill_proposals, proposal_layout
from kimi_backend.runners.graphs.draws import Draws
from kimi_backend.runners.graphs.row_inputs import pad_rows, row_specs
from kimi_backend.runners.graphs.static_arrays import Array, ArrayLayout
from kimi_backend.runners.graphs.target_inputs import draw_layout, fill_draws, fill_forward, forward_layout
from kimi_backend.runners.row_arrays import RowArrays
from kimi_kernels.kernel_set import KernelSet
from support.captured_runners import Setting, runner_pair
from support.speculative_loop import SpeculativeLoop, Step

BLOCK_SIZE, PADDING_ROW = 4, 5
ROWS, DRAWS, PROPOSALS = Bucket.of(4, 8), Bucket.of(4, 4), Bucket.of(4, 1, 3)
WORKED_OUT = {"seq_lens", "positions", "slots", "token_index", "is_wanted", "counts"}
"""Arrays of proposals that the device works out, whole."""


@pytest.fixture(scope="module")
def step() -> Step:
    """Two sequences where the buckets hold four."""
    pair = runner_pair(Setting(kernels=KernelSet.plain()), "mla31", None)
    return SpeculativeLoop(*pair, [[1, 2, 3], [1, 2]], [3, 3]).step()


def forward(arrays: dict[str, Array], step: Step) -> None:
    plan = step.target_plan
    rows = RowArrays.of(plan.rows, BLOCK_SIZE)
    fill_forward(arrays, plan, rows, ChunkParts.of(plan.rows, rows, ROWS), Draws.of(plan, rows), 7, PADDING_ROW)


def draws(arrays: dict[str, Array], step: Step) -> None:
    plan = step.target_plan
    fill_draws(arrays, plan, Draws.of(plan, RowArrays.of(plan.rows, BLOCK_SIZE)), PADDING_ROW)


def extension(arrays: dict[str, Array], step: Step) -> None:
    plan = step.draft_plan
    assert plan is not None
    rows = RowArrays.of(plan.rows, BLOCK_SIZE)
    fill_extension(arrays, plan, rows, ChunkParts.of(plan.rows, rows, ROWS), 7, PADDING_ROW)


def proposals(arrays: dict[str, Array], step: Step) -> None:
    assert step.draft_plan is not None
    fill_proposals(arrays, step.draft_plan, PADDING_ROW)


@pytest.mark.parametrize(
    ("layout", "fill"),
    [
        (forward_layout(ROWS), forward),
        (draw_layout(DRAWS), draws),
        (extension_layout(ROWS), extension),
        (proposal_layout(PROPOSALS), proposals),
    ],
)
def test_nothing_of_the_step_before_stays(
    layout: ArrayLayout, fill: Callable[[dict[str, Array], Step], None], step: Step
) -> None:
    found = []
    for left in (0, 77):
        arrays = {name: np.full(shape, left, kind) for name, shape, kind, _ in layout.arrays}
        fill(arrays, step)
        found.append(arrays)
    differing = [name for name in found[0] if not np.array_equal(found[0][name], found[1][name])]
    assert set(differing) == (WORKED_OUT if fill is proposals else set())


def test_padding_begins_behind_the_last_of_each() -> None:
    """3 rows, 2 sequences and 1 part where 8, 4 and 4 fit; then as many as fit, which nothing is written over."""
    bucket = Bucket.of(4, 2)
    arrays = {name: np.full(shape, 77, kind) for name, (shape, kind) in row_specs(bucket).items()}
    arrays |= {name: np.full(size, 77, np.int64) for name, size in (("more", 8), ("kept", 8), ("of_sequence", 4))}
    parts = bucket.num_parts
    pad_rows(arrays, 3, 2, 1, PADDING_ROW, by_row=("more",), by_sequence=("of_sequence",))
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "token_ids": [77] * 3 + [0] * 5,
        "positions": [77] * 3 + [0] * 5,
        "slots": [77] * 3 + [-1] * 5,
        "sequence": [77] * 3 + [3] * 5,
        "aux_rows": [77] * 8,
        "more": [77] * 3 + [0] * 5,
        "kept": [77] * 8,
        "cu_seqlens": [0, 77, 77, 3, 3],
        "table_rows": [77, 77, PADDING_ROW, PADDING_ROW],
        "of_sequence": [77, 77, 0, 0],
        "part_cu_seqlens": [0, 77] + [3] * (parts - 1),
        "seq_lens": [77] + [0] * (parts - 1),
    }
    full = {name: np.full(shape, 77, kind) for name, (shape, kind) in row_specs(bucket).items()}
    pad_rows(full, 8, 4, parts, PADDING_ROW)
    starts = {name for name, array in full.items() if not (array == 77).all()}
    assert starts == {"cu_seqlens", "part_cu_seqlens"}
    assert all(full[name].tolist() == [0] + [77] * (len(full[name]) - 1) for name in starts)
