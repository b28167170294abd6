"""How the expert kernels are launched: tile shapes by the number of choices an expert gets, grids by worst case."""

from dataclasses import dataclass

FEW_CHOICES = 64
"""Up to this many choices, sorting them saves next to nothing: they rarely share an expert."""
PROCESSORS = 132
"""Multiprocessors of an H100: a split of the few-token products aims at several programs on each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FewLaunch:
    """Unsorted kernels: a program a choice, then a program a token."""

    splits: int
    """Ranges of the first product's columns."""
    gate_up_stages: int
    down_rows: int
    """Rows of a program of the second product: 32, 64 or 128."""
    down_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedLaunch:
    """Sorted kernels: a program a tile of choices of one expert."""

    columns: int
    """Choices a tile."""
    scale_weights: bool
    gate_up_stages: int
    gate_up_warps: int
    down_stages: int
    down_warps: int
    tiles_a_group: int
    """Row tiles of the second product that one program walks through."""
    gate_up_tall: bool = False
    """The first product by the kernel that overlaps tensor cores and dequantisation."""
    down_tall: bool = False
    resident: bool
    """The second product's activations stay on the multiprocessor meanwhile; for at most two steps of columns."""


def few_launch(num_choices: int, gate_up_row_tiles: int, gate_up_steps: int) -> FewLaunch:
    """A launch for up to `FEW_CHOICES` choices."""
    splits = 1
    while splits < 8 and num_choices * gate_up_row_tiles * splits < 3 * PROCESSORS and gate_up_steps >= 8 * splits:
        splits *= 2
    return FewLaunch(splits=splits, gate_up_stages=4, down_rows=64, down_stages=6)


def sorted_launch(num_choices: int, num_experts: int, down_steps: int) -> SortedLaunch:
    """A launch for more choices."""
    mean = num_choices / num_experts
    columns = 8 if mean <= 2 else 16 if mean <= 12 else 32 if mean <= 24 else 64
    resident = down_steps <= 2
    return SortedLaunch(
        columns=columns,
        scale_weights=columns >= 32,
        gate_up_stages=4 if columns <= 16 else 3,
        gate_up_warps=4,
        down_stages=3,
        down_warps=4,
        tiles_a_group=8 if resident else 1,
        resident=resident,
    )


def max_tiles(num_choices: int, num_experts: int, columns: int) -> int:
    """Most tiles that `num_choices` can fill: every expert with a choice ends in a partial one."""
    return min(num_choices, num_choices // columns + min(num_experts, num_choices))
