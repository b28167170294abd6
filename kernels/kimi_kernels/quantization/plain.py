"""Formulas of the weight formats: int4 in groups and float8 in blocks, both ways (MXFP4: `mxfp4`).

`quantize_*` round to the nearest code; they serve the writer of test checkpoints, the drafts' tools and the tests.
"""

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require, require_dtype, require_float, require_shape
from kimi_kernels.quantization.mxfp4 import dequantize_mxfp4, split_last
from kimi_kernels.weights import FP8_BLOCK_SIZE, INT4_GROUP_SIZE, Fp8Weight, Int4Weight, Mxfp4Weight, Weight

NIBBLES_PER_WORD = 8
INT4_OFFSET = 8
INT4_MIN = -8
INT4_MAX = 7
FP8_MAX = 448.0
"""Largest finite float8_e4m3fn."""


def check_int4(weight: Int4Weight) -> None:
    """Raises ValueError: a dtype is wrong, or the scales do not fit the packed words and the group size."""
    require_dtype("packed", weight.packed, torch.int32)
    require_float("scales", weight.scales)
    *leading, in_features = weight.shape
    _check_group_size(weight.group_size, in_features)
    require_shape("scales", weight.scales, *leading, in_features // weight.group_size)


def _check_group_size(group_size: int, in_features: int) -> None:
    is_divisor = group_size > 0 and in_features % group_size == 0
    require(is_divisor, "group_size", group_size, f"a divisor of in_features {in_features}")


def check_fp8(weight: Fp8Weight) -> None:
    """Raises ValueError: a dtype is wrong, or the scales do not fit the values and the block size."""
    require_dtype("values", weight.values, torch.float8_e4m3fn)
    require_float("scales", weight.scales)
    require_shape("scales", weight.scales, *_block_grid(weight.shape, weight.block_size))


def dequantize(weight: Weight) -> Tensor:
    """A weight of any format as a plain tensor: float32 if it was quantised, else unchanged."""
    if isinstance(weight, Int4Weight):
        return dequantize_int4(weight)
    if isinstance(weight, Fp8Weight):
        return dequantize_fp8(weight)
    if isinstance(weight, Mxfp4Weight):
        return dequantize_mxfp4(weight)
    require_float("weight", weight)
    return weight


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack signed int4 codes, eight a word, the first in the least significant nibble.

    Args:
        codes: [..., in_features] of any integer dtype, -8 to 7, in_features a multiple of 8.
    Returns:
        [..., in_features / 8] int32.
    """
    require(not codes.is_floating_point(), "codes", codes.dtype, "an integer dtype")
    require(codes.shape[-1] % NIBBLES_PER_WORD == 0, "codes", f"{codes.shape[-1]} columns", "a multiple of 8")
    if codes.numel() and (int(codes.min()) < INT4_MIN or int(codes.max()) > INT4_MAX):
        raise ValueError(f"codes: got values {int(codes.min())} to {int(codes.max())}, expected -8 to 7")
    nibbles = split_last(codes.to(torch.int64) + INT4_OFFSET, NIBBLES_PER_WORD)
    words = (nibbles << _nibble_shifts(torch.int64, codes.device)).sum(dim=-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of `pack_nibbles`.

    Args:
        packed: [..., words] int32.
    Returns:
        [..., words * 8] int8, -8 to 7.
    """
    require_dtype("packed", packed, torch.int32)
    nibbles = (packed.unsqueeze(-1) >> _nibble_shifts(torch.int32, packed.device)) & 0xF
    return (nibbles - INT4_OFFSET).to(torch.int8).flatten(-2)


def dequantize_int4(weight: Int4Weight) -> Tensor:
    """code * scale of its group, exact in float32 (a code has 4 bits, a bf16 scale 8).

    Returns:
        [..., out_features, in_features] float32.
    Raises:
        ValueError: as `check_int4`.
    """
    check_int4(weight)
    grouped = split_last(unpack_nibbles(weight.packed).float(), weight.group_size)
    return (grouped * weight.scales.float().unsqueeze(-1)).flatten(-2)


def quantize_int4(
    weight: Tensor, group_size: int = INT4_GROUP_SIZE, scale_dtype: torch.dtype = torch.bfloat16
) -> Int4Weight:
    """Symmetric minmax int4: a group's largest magnitude is 7.5 steps; codes are clamped to -8 … 7.

    Args:
        weight: [..., out_features, in_features], in_features a multiple of 8 and of group_size.
    """
    require_float("weight", weight)
    _check_group_size(group_size, weight.shape[-1])
    grouped = split_last(weight.float(), group_size)
    largest = grouped.abs().amax(dim=-1)
    steps = (INT4_MAX - INT4_MIN) / 2
    scales = torch.where(largest > 0, largest / steps, torch.ones_like(largest)).to(scale_dtype)
    codes = (grouped / scales.float().unsqueeze(-1)).round().clamp(INT4_MIN, INT4_MAX).to(torch.int8)
    return Int4Weight(packed=pack_nibbles(codes.flatten(-2)), scales=scales, group_size=group_size)


def dequantize_fp8(weight: Fp8Weight) -> Tensor:
    """value * scale of its block, in float32.

    Returns:
        [..., out_features, in_features] float32.
    Raises:
        ValueError: as `check_fp8`.
    """
    check_fp8(weight)
    return weight.values.float() * _expand_blocks(weight.scales.float(), weight.values.shape, weight.block_size)


def quantize_fp8(weight: Tensor, block_size: int = FP8_BLOCK_SIZE) -> Fp8Weight:
    """float8_e4m3fn whose largest magnitude in each block is 448.

    Args:
        weight: [..., out_features, in_features]; blocks at the right and bottom border may be partial.
    """
    require_float("weight", weight)
    plain = weight.float()
    *leading, rows, columns = plain.shape
    block_rows, block_columns = _block_grid(plain.shape, block_size)[-2:]
    padded = plain.new_zeros(*leading, block_rows * block_size, block_columns * block_size)
    padded[..., :rows, :columns] = plain
    blocks = padded.view(*leading, block_rows, block_size, block_columns, block_size)
    largest = blocks.abs().amax(dim=(-3, -1))
    scales = torch.where(largest > 0, largest / FP8_MAX, torch.ones_like(largest))
    values = (plain / _expand_blocks(scales, plain.shape, block_size)).clamp(-FP8_MAX, FP8_MAX)
    return Fp8Weight(values=values.to(torch.float8_e4m3fn), scales=scales, block_size=block_size)


def _nibble_shifts(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(0, 4 * NIBBLES_PER_WORD, 4, dtype=dtype, device=device)


def _block_grid(shape: torch.Size, block_size: int) -> list[int]:
    require(block_size > 0, "block_size", block_size, "a positive number")
    *leading, rows, columns = shape
    return [*leading, -(-rows // block_size), -(-columns // block_size)]


def _expand_blocks(scales: Tensor, shape: torch.Size, block_size: int) -> Tensor:
    rows = scales.repeat_interleave(block_size, dim=-2)[..., : shape[-2], :]
    return rows.repeat_interleave(block_size, dim=-1)[..., : shape[-1]]
