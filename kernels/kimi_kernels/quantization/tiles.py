"""Weights cut into the tiles that the Triton-language matrix products stream: each tile one contiguous block of memory.

A tile holds 128 rows of the weight and one step of columns. 16-bit words hold several columns, one a *plane*, so that a
plane is taken out of a register of two words by one mask and never has to be interleaved with another:

| kind  | columns | word [row, j] of a tile                                   | scales of a step       |
| ----- | ------- | --------------------------------------------------------- | ---------------------- |
| int4  | 128     | [128, 32] int16: nibble p is column 32 p + j, as code + 8 | [128] int64: four bf16 |
| mxfp4 | 128     | [128, 32] int16: bits as `MXFP4_BITS`; columns as int4    | [128] int32: four e8m0 |
| fp8   | 128     | [128, 64] int16: byte p is column 64 p + j, float8_e4m3fn | [128] float32          |
| float | 64      | [128, 64] in the weight's own dtype                       | none                   |

An int4 or mxfp4 plane is one scale group. Rows past the weight and columns past a whole step hold zeros. An int4 scale
is kept 2^7 too large, as the kernels widen a code to a number that is 2^7 too small. An mxfp4 scale is kept 2^126 too
large, as the code's bits, seen as a bf16, are 2^126 too small; one mask leaves those of planes 0 and 1, or of 2 and 3
in a word turned right by 8, as two bf16.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require, require_float
from kimi_kernels.quantization.mxfp4 import SCALE_BIAS, check_mxfp4
from kimi_kernels.quantization.plain import check_fp8, check_int4
from kimi_kernels.weights import Fp8Weight, Int4Weight, Mxfp4Weight, Weight

TILE_ROWS = 128
INT4_PLANE_COLUMNS = 32
INT4_STEP_COLUMNS = 4 * INT4_PLANE_COLUMNS
INT4_SCALE_FACTOR = 2.0**7
MXFP4_BITS = ((15, 6), (12, 3), (13, 0), (14, 9))
"""Bits of each plane's code, in a word: its sign, the lowest of its three bits of magnitude. A bf16 has them at
bits 15 and 6: one shift and one mask take a code of the first two planes out, the others need more."""
MXFP4_SCALE_OFFSET = 126
MXFP4_SCALE_ORDER, MXFP4_SCALE_TURN = [0, 2, 1, 3], 7
"""Planes whose scales are the bytes of a word, which is turned left by the bits of a bf16's mantissa."""
MXFP4_MAX_SCALE = SCALE_BIAS + 1
"""Scales of at most 2, weights of at most 12: what keeps a scale that is 2^126 too large finite."""
FP8_PLANE_COLUMNS = 64
FP8_STEP_COLUMNS = 2 * FP8_PLANE_COLUMNS
FLOAT_STEP_COLUMNS = 64
GATE_UP_STRIPE = 8
"""Gate and up rows alternate in stripes of 8: a thread that holds row r of a product's tile also holds row r + 8."""
ZERO_NIBBLES = 0x88
"""Two int4 zeros in a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTiles:
    """Stacked weights in tiles; E matrices, padded to whole tiles."""

    kind: str
    """int4, mxfp4, fp8 or float."""
    tiles: Tensor
    """[E, row tiles, steps, 128, words a row]."""
    scales: Tensor
    """[E, row tiles, steps, 128]; empty for float."""


def step_columns(kind: str) -> int:
    """Columns of the weight that one tile covers."""
    four_bits = dict.fromkeys(("int4", "mxfp4"), INT4_STEP_COLUMNS)
    return (four_bits | {"fp8": FP8_STEP_COLUMNS, "float": FLOAT_STEP_COLUMNS})[kind]


def identity_rows(num_rows: int, device: torch.device) -> Tensor:
    """Rows in their own order, padded to whole tiles with -1."""
    padded = -(-num_rows // TILE_ROWS) * TILE_ROWS
    rows = torch.arange(padded, device=device)
    return torch.where(rows < num_rows, rows, -1)


def gate_up_rows(intermediate_size: int, device: torch.device) -> Tensor:
    """Rows of [gate; up] in stripes: 8 of gate, the 8 of up that belong to them, and so on; -1 pads to whole tiles."""
    half = TILE_ROWS // 2
    padded = -(-intermediate_size // half) * half
    columns = torch.arange(padded, device=device)
    gate = torch.where(columns < intermediate_size, columns, -1).view(-1, GATE_UP_STRIPE)
    up = torch.where(gate >= 0, gate + intermediate_size, -1)
    return torch.stack([gate, up], dim=1).flatten()


def cut_tiles(weight: Weight, rows: Tensor) -> WeightTiles:
    """Gather the given rows of each matrix and cut them into tiles.

    Args:
        weight: [E, out_features, in_features].
        rows: [a multiple of 128] int64, rows of the weight; -1 is a row of zeros.
    Raises:
        ValueError: a shape does not fit, an int4 group is not a multiple of 32, fp8 blocks are not of 128 columns,
            or an mxfp4 scale is above 2.
    """
    if isinstance(weight, Int4Weight):
        _check_int4(weight)
        scales = weight.scales.repeat_interleave(weight.group_size // INT4_PLANE_COLUMNS, dim=-1)
        parts = [_int4_tiles(packed, each, rows) for packed, each in zip(weight.packed, scales, strict=True)]
        return WeightTiles(kind="int4", tiles=_stack([t for t, _ in parts]), scales=_stack([s for _, s in parts]))
    if isinstance(weight, Fp8Weight):
        _check_fp8(weight)
        matrices = zip(weight.values, weight.scales, strict=True)
        parts = [_fp8_tiles(values, each, rows, weight.block_size) for values, each in matrices]
        return WeightTiles(kind="fp8", tiles=_stack([t for t, _ in parts]), scales=_stack([s for _, s in parts]))
    if isinstance(weight, Mxfp4Weight):
        _check_mxfp4(weight)
        parts = [_mxfp4_tiles(codes, scales, rows) for codes, scales in zip(weight.codes, weight.scales, strict=True)]
        return WeightTiles(kind="mxfp4", tiles=_stack([t for t, _ in parts]), scales=_stack([s for _, s in parts]))
    require_float("weight", weight)
    require(weight.ndim == 3, "weight", f"{weight.ndim} dimensions", "3")
    tiles = _stack([_float_tiles(matrix, rows) for matrix in weight])
    return WeightTiles(kind="float", tiles=tiles, scales=torch.empty(0, dtype=torch.float32, device=weight.device))


def _stack(parts: list[Tensor]) -> Tensor:
    require(len(parts) > 0, "weight", "0 matrices", "at least 1")
    return torch.stack(parts)


def _check_int4(weight: Int4Weight) -> None:
    check_int4(weight)
    require(weight.packed.ndim == 3, "packed", f"{weight.packed.ndim} dimensions", "3")
    group = weight.group_size
    require(group % INT4_PLANE_COLUMNS == 0, "group_size", group, f"a multiple of {INT4_PLANE_COLUMNS}")


def _int4_tiles(packed: Tensor, scales: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """packed: [rows, columns / 8] int32; scales: [rows, columns / 32]."""
    # A little-endian word's bytes hold columns (0, 1), (2, 3), ...: low nibble first.
    planes = _nibble_planes(packed.contiguous().view(torch.uint8), rows, ZERO_NIBBLES)
    low = planes[..., 0, :] | planes[..., 1, :] << 4
    high = planes[..., 2, :] | planes[..., 3, :] << 4
    words = torch.stack([low, high], dim=-1).view(torch.int16).squeeze(-1)
    padded = _gather(scales.to(torch.bfloat16) * INT4_SCALE_FACTOR, rows, 4, 0)
    groups = padded.view(-1, TILE_ROWS, padded.shape[1] // 4, 4).transpose(1, 2).contiguous()
    return words, groups.view(torch.int64).squeeze(-1)


def _nibble_planes(pairs: Tensor, rows: Tensor, zeros: int) -> Tensor:
    """pairs: [rows, columns / 2] uint8, low nibble first; zeros: two of them -> [row tiles, steps, 128, 4, 32]."""
    padded = _gather(pairs, rows, INT4_STEP_COLUMNS // 2, zeros)
    nibbles = torch.stack([padded & 0xF, padded >> 4], dim=-1)
    num_steps = padded.shape[1] * 2 // INT4_STEP_COLUMNS
    return nibbles.view(-1, TILE_ROWS, num_steps, 4, INT4_PLANE_COLUMNS).transpose(1, 2)


def _check_mxfp4(weight: Mxfp4Weight) -> None:
    check_mxfp4(weight)
    require(weight.codes.ndim == 3, "codes", f"{weight.codes.ndim} dimensions", "3")
    largest = int(weight.scales.max()) if weight.scales.numel() else 0
    require(largest <= MXFP4_MAX_SCALE, "scales", f"2 ** {largest - SCALE_BIAS} or NaN", "at most 2")


def _mxfp4_tiles(codes: Tensor, scales: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """codes: [rows, columns / 2] uint8; scales: [rows, columns / 32] uint8."""
    planes = _nibble_planes(codes, rows, 0).to(torch.int32)
    parts = [
        (planes[..., p, :] >> 3) << sign | (planes[..., p, :] & 7) << magnitude
        for p, (sign, magnitude) in enumerate(MXFP4_BITS)
    ]
    words = parts[0] | parts[1] | parts[2] | parts[3]
    padded = _gather(scales + MXFP4_SCALE_OFFSET, rows, 4, MXFP4_SCALE_OFFSET)
    groups = padded.view(-1, TILE_ROWS, padded.shape[1] // 4, 4).transpose(1, 2)
    bits = groups[..., MXFP4_SCALE_ORDER].contiguous().view(torch.int32).squeeze(-1).to(torch.int64) & 0xFFFFFFFF
    turned = bits << MXFP4_SCALE_TURN | bits >> (32 - MXFP4_SCALE_TURN)
    return (words << 16 >> 16).to(torch.int16), (turned << 32 >> 32).to(torch.int32)


def _check_fp8(weight: Fp8Weight) -> None:
    check_fp8(weight)
    require(weight.values.ndim == 3, "values", f"{weight.values.ndim} dimensions", "3")
    block = weight.block_size
    require(block % FP8_STEP_COLUMNS == 0, "block_size", block, f"a multiple of {FP8_STEP_COLUMNS}")


def _fp8_tiles(values: Tensor, scales: Tensor, rows: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """values: [rows, columns] float8_e4m3fn; scales: [row blocks, column blocks]."""
    padded = _gather(values.contiguous().view(torch.uint8), rows, FP8_STEP_COLUMNS, 0)
    num_steps = padded.shape[1] // FP8_STEP_COLUMNS
    planes = padded.view(-1, TILE_ROWS, num_steps, 2, FP8_PLANE_COLUMNS).transpose(1, 2)
    words = torch.stack([planes[..., 0, :], planes[..., 1, :]], dim=-1).view(torch.int16).squeeze(-1)
    by_step = scales.float().repeat_interleave(block_size // FP8_STEP_COLUMNS, dim=-1)[:, :num_steps]
    by_row = by_step[rows.clamp_min(0) // block_size]
    return words, by_row.view(-1, TILE_ROWS, num_steps).transpose(1, 2).contiguous()


def _float_tiles(matrix: Tensor, rows: Tensor) -> Tensor:
    padded = _gather(matrix, rows, FLOAT_STEP_COLUMNS, 0)
    num_steps = padded.shape[1] // FLOAT_STEP_COLUMNS
    return padded.view(-1, TILE_ROWS, num_steps, FLOAT_STEP_COLUMNS).transpose(1, 2).contiguous()


def _gather(matrix: Tensor, rows: Tensor, multiple: int, fill: int) -> Tensor:
    """Rows of a matrix, its columns padded to a multiple; `fill` where there is nothing."""
    num_columns = matrix.shape[1]
    padded = -(-num_columns // multiple) * multiple
    gathered = matrix[rows.clamp_min(0)]
    gathered = torch.where((rows >= 0).unsqueeze(1), gathered, torch.full_like(gathered[:1, :1], fill))
    return torch.nn.functional.pad(gathered, (0, padded - num_columns), value=fill)
