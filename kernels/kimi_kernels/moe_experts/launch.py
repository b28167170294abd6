"""Launch tables of the expert kernels: tile shapes by the number of assignments an expert gets, grids by worst case.

The numbers were chosen by measurement on an H100 and an H200 (docs/benchmarks_kernels.md, "Mixture of experts").
"""

from dataclasses import dataclass

FEW_ASSIGNMENTS = 64
"""The most assignments that are not sorted: sorting them saves next to nothing, as they rarely share an expert."""
FEW_DOWN_PROGRAMS = 224
"""Programs of the few-token second product, at least, where each walks through several row tiles."""
FEW_DOWN_STEPS = 4
"""Widest second product, in steps of columns, for which they are taken."""
RESIDENT_STEPS = 2
"""Widest second product, in steps, whose activations stay on the multiprocessor."""
MAX_SPLITS = 8
MAX_TILES_A_GROUP = 7
MAX_CHUNK = 512
"""Assignments that one program sorts."""
MOST_FOR_PLAIN = 64.0
"""The mean number of assignments an expert up to which tiles of 64 are faster than the persistent kernel's."""
WIDE_COLUMNS = ((8, 4.0), (16, 12.0), (32, 24.0), (64, MOST_FOR_PLAIN))
"""Assignments a tile, and the mean number of assignments an expert up to which it is taken."""
NARROW_COLUMNS = ((8, 7.0), (32, 24.0), (64, MOST_FOR_PLAIN))
"""The same where the second product's activations stay on the multiprocessor: registers hold those of eight."""
TALL_COLUMNS = 128
"""Assignments a tile of 256 rows of `kernel_tall`, beyond the tables' means."""
PERSISTENT_COLUMNS = 192
"""Assignments a tile of `kernel_persistent`, most of which hold an expert's share of 8,192 tokens."""
PROCESSORS = 132
"""Multiprocessors of an H100: a split of the few-token products aims at several programs on each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FewLaunch:
    """Unsorted kernels: programs of one assignment each."""

    splits: int
    """Ranges of the first product's columns."""
    gate_up_stages: int
    down_tiles_a_group: int
    """Row tiles of the second product that one program walks through."""
    down_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedLaunch:
    """Sorted kernels: a program a tile of assignments of one expert."""

    columns: int
    """Assignments a tile."""
    scale_weights: bool
    """Scale int4 weights rather than the products of a group."""
    stages: int
    """Steps of the weight on their way to the multiprocessor."""
    tiles_a_group: int
    """Row tiles of the second product that one program walks through."""
    resident: bool
    """The second product's activations stay on the multiprocessor meanwhile; for at most two steps of columns."""
    gate_up_tall_rows: int
    """Rows of the weight a program of `kernel_tall` takes, 128 or 256; 0: the plain kernel runs."""
    down_tall_rows: int

    @property
    def is_persistent(self) -> bool:
        """`kernel_persistent` runs both products: no other kernel takes such tiles."""
        return self.columns == PERSISTENT_COLUMNS

    @property
    def constants(self) -> dict[str, int]:
        return {"COLUMNS": self.columns, "STAGES": self.stages, "SCALE_WEIGHTS": self.scale_weights}


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperShapes:
    """The products that the kernels for Hopper can run for."""

    gate_up_tall: bool = False
    down_tall: bool = False
    persistent: bool = False


def is_few(num_assignments: int, down_steps: int) -> bool:
    """Tell whether the unsorted kernels are the faster ones."""
    return num_assignments <= FEW_ASSIGNMENTS and down_steps <= FEW_DOWN_STEPS


def may_start_early(down_steps: int) -> bool:
    """Tell whether the kernels of a layer start as the kernel before them ends. Those of a wide layer do not: with one
    token their few programs crowd, and five layers at full width took 1.61 ms a round instead of 1.55 (one H200)."""
    return down_steps <= FEW_DOWN_STEPS


def few_launch(num_assignments: int, gate_up_row_tiles: int, gate_up_steps: int, down_row_tiles: int) -> FewLaunch:
    """A launch for up to `FEW_ASSIGNMENTS` assignments: about two programs of a product a multiprocessor."""
    splits = 1
    while (
        splits < MAX_SPLITS
        and 2 * num_assignments * gate_up_row_tiles * splits < 3 * PROCESSORS
        and gate_up_steps >= 8 * splits
    ):
        splits *= 2
    tiles_a_group = min(MAX_TILES_A_GROUP, max(1, num_assignments * down_row_tiles // FEW_DOWN_PROGRAMS))
    return FewLaunch(splits=splits, gate_up_stages=4, down_tiles_a_group=tiles_a_group, down_stages=3)


def sorted_launch(num_assignments: int, num_experts: int, down_steps: int, shapes: HopperShapes) -> SortedLaunch:
    """A launch for any number of assignments."""
    mean = num_assignments / num_experts
    resident = down_steps <= RESIDENT_STEPS
    columns_by_mean = NARROW_COLUMNS if resident else WIDE_COLUMNS
    widest = PERSISTENT_COLUMNS if shapes.persistent else TALL_COLUMNS if shapes.down_tall else 64
    columns = next((size for size, most in columns_by_mean if mean <= most), widest)
    tall_rows = {64: 128, TALL_COLUMNS: 256}.get(columns, 0)
    # Up to a mean of 64 a narrow layer reads for longer than it computes: the plain kernel is as fast.
    gate_up_is_tall = shapes.gate_up_tall and (shapes.down_tall or mean > MOST_FOR_PLAIN)
    return SortedLaunch(
        columns=columns,
        scale_weights=columns >= 32,
        stages=4 if columns <= 16 else 3,
        tiles_a_group=MAX_TILES_A_GROUP if resident else 1,
        resident=resident,
        gate_up_tall_rows=tall_rows if gate_up_is_tall else 0,
        down_tall_rows=tall_rows if shapes.down_tall else 0,
    )


def max_tiles(num_assignments: int, num_experts: int, columns: int) -> int:
    """Most tiles that `num_assignments` can fill: every expert with an assignment ends in a partial one."""
    return min(num_assignments, num_assignments // columns + min(num_experts, num_assignments))
