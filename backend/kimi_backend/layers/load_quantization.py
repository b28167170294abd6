"""Quantises linear layers while they load, whatever their files store.

A draft may be rounded like this: the target decides every token, so its error costs acceptance, never text.
"""

from dataclasses import replace

import torch

from kimi_backend.config.linear_format import LinearFormat
from kimi_backend.errors import ConfigError
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.quantization.reference import quantize_fp8, quantize_int4
from kimi_kernels.weights import FP8_BLOCK_SIZE, INT4_GROUP_SIZE, Fp8Weight, Int4Weight, PackedWeight, Weight

_ROWS_AT_ONCE = 8192
"""Rounding goes through float32 and int64; in slices, a head of 163,840 rows needs no ten times its own memory."""
assert _ROWS_AT_ONCE % FP8_BLOCK_SIZE == 0, "a slice ends where a block ends"


def quantize(weight: torch.Tensor, linear_format: LinearFormat) -> Weight:
    """Round a weight [out_features, in_features] to the nearest values of a format.

    Raises:
        ConfigError: int4 was chosen and in_features is no multiple of its groups.
    """
    if linear_format is LinearFormat.NONE:
        return weight
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
    groups = [quantize_int4(rows) for rows in slices]
    return Int4Weight(
        packed=torch.cat([part.packed for part in groups]), scales=torch.cat([part.scales for part in groups])
    )


def quantizing_kernels(kernels: KernelSet, linear_format: LinearFormat) -> KernelSet:
    """The same kernels, which round every plain weight of a linear layer before they pack it.

    MLA's kv_b_proj, which the layer takes apart into one matrix a head, and the embedding stay as they are.
    """
    if linear_format is LinearFormat.NONE:
        return kernels

    def pack_linear(weight: Weight) -> PackedWeight:
        return kernels.pack_linear(quantize(weight, linear_format) if isinstance(weight, torch.Tensor) else weight)

    return replace(kernels, pack_linear=pack_linear)
