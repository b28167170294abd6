"""The products of few rows that stream their weight (`kernel_stream`), and in which sizes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_kernels.hopper import is_hopper

TILE_ROWS = 64
"""Rows of the weight that a warpgroup multiplies at once."""
MOST_ROWS = 16
MOST_ROWS_OF_HEADS = 64
HEAD_FEATURES = 65_536
"""Weights with at least so many rows, a model's heads, stream for up to MOST_ROWS_OF_HEADS rows of x, others for up to
MOST_ROWS: beyond, cuBLAS is as fast."""
FEWEST_VALUES = 1 << 21
"""Smaller weights were not measured."""
PROCESSORS = 132
MAX_SPLITS = 4
STREAMED_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class StreamLaunch:
    """Sizes of a launch. `splits` decides the order of sums, the others the time alone."""

    columns: int
    """Rows of x, padded."""
    splits: int = 1
    """Parts of the weight's columns, each a program's."""
    stages: int = 2
    """Tiles in a program's ring."""
    tile_rows: int = TILE_ROWS
    """Rows of the weight a program."""
    step: int = 256
    """Columns at a time."""


def stream_splits(out_features: int) -> int:
    """Parts of the columns, whatever the rows of x, so that a row's result does not depend on how many there are.

    The most that leave each multiprocessor one program: a 200 KB ring a multiprocessor keeps memory busy, and parts
    cost a sum.
    """
    tiles, splits = _num_tiles(out_features), 1
    while splits < MAX_SPLITS and 2 * splits * tiles <= PROCESSORS:
        splits *= 2
    return splits


def stream_launch(num_rows: int, out_features: int) -> StreamLaunch:
    """Sizes for T = num_rows, at most MOST_ROWS_OF_HEADS.

    One program a multiprocessor has a ring of five tiles; where there are more programs, two share a multiprocessor, so
    that one's first loads hide behind the other's last. More rows of x take taller tiles, as every program reads them
    all.
    """
    if num_rows > MOST_ROWS:
        return StreamLaunch(32 if num_rows <= 32 else 64, tile_rows=2 * TILE_ROWS, step=128)
    columns, splits = 8 if num_rows <= 8 else 16, stream_splits(out_features)
    is_one_wave = _num_tiles(out_features) * splits <= PROCESSORS
    return StreamLaunch(columns, splits, stages=5 if is_one_wave else 3 if columns == 8 else 2)


def _num_tiles(out_features: int) -> int:
    return -(-out_features // TILE_ROWS)


def new_arrivals(weight: Tensor) -> tuple[Tensor, ...]:
    """Make the int32 zeros, [tiles], that a plain weight needs beside itself to be streamed; nothing if it never is."""
    streams = (
        weight.dtype in STREAMED_DTYPES
        and weight.numel() >= FEWEST_VALUES
        and weight.shape[1] % 8 == 0
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and is_hopper(weight.device)
    )
    if not streams:
        return ()
    return (torch.zeros(_num_tiles(weight.shape[0]), dtype=torch.int32, device=weight.device),)


def can_stream(x: Tensor, weight: Tensor) -> bool:
    """Tell whether these rows are few and lie as bulk copies want them, for a weight that has arrivals."""
    most_rows = MOST_ROWS if weight.shape[0] < HEAD_FEATURES else MOST_ROWS_OF_HEADS
    return (
        0 < x.shape[0] <= most_rows
        and x.dtype == weight.dtype
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
    )
