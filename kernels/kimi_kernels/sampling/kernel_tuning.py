"""Sizes of the sampling kernels' launches: they change the time and nothing else."""

from dataclasses import dataclass

import triton

from kimi_kernels.kernel_interpreter import INTERPRETED
from kimi_kernels.sampling.kernel_check import MAX_TILES


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Sizes that change the time and nothing else."""

    draw_columns: int = 256
    draw_warps: int = 1
    """One, so that no maximum over a tile needs a barrier."""
    draw_registers: int | None = 128
    """The compiler is held to this many a thread, so that more programs fit."""
    read_columns: int = 1024
    read_warps: int = 4
    stages: int = 4
    wanted_programs: int = 2048
    """A row is cut until there are about this many programs: sixteen a multiprocessor of an H100."""
    max_splits: int = 64
    select_columns: int = 2048
    select_warps: int = 8
    process_entries: int = 256


TUNING = Tuning()
if INTERPRETED:  # small, so that tests cross every border with small vocabularies
    TUNING = Tuning(draw_columns=32, read_columns=64, wanted_programs=8, select_columns=64, process_entries=8)


@dataclass(frozen=True, slots=True)
class Splits:
    """The cut of every row into `count` splits of `columns`."""

    count: int
    columns: int

    @staticmethod
    def of(num_rows: int, num_columns: int, tuning: Tuning) -> "Splits":
        tile_columns = max(tuning.draw_columns, tuning.read_columns)
        tiles = triton.cdiv(num_columns, tile_columns)
        count = min(triton.next_power_of_2(triton.cdiv(tuning.wanted_programs, num_rows)), tuning.max_splits, tiles)
        count = max(count, triton.cdiv(tiles, MAX_TILES.value))
        columns = triton.cdiv(tiles, count) * tile_columns
        return Splits(triton.cdiv(num_columns, columns), columns)
