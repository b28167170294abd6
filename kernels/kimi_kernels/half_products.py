"""Products of float32 rows with weights kept in float16, summed in float32 (FBGEMM, in torch for x86).

A step of few rows is limited by reading weights, and half as wide ones take half as long. Nothing is lost: bf16 weights
have 8 significant bits and int4 ones 11, as many as float16. Each row is summed on its own, in the order of the inputs,
whatever rows run beside it; several rows share one read of the weight. Without AVX-512 FBGEMM sums in another order
where one row or two are left over from its tiles of at most 6: there rows are padded so that none are.
"""

import warnings
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from kimi_kernels.constants import constant
from kimi_kernels.row_tiles import ceil_to

ROUNDING = 2.0**-25
"""The loss that a weight may have: half a unit of float16's smallest step, below 2^-14 only. A float32 sum of
a hundred terms of size 1 loses more."""
TILE_ROWS, FEWEST_ROWS = 6, 3
"""FBGEMM's most rows of a tile without AVX-512, and the fewest that it sums like so many."""


@cache
def is_available() -> bool:
    """Tell whether this torch has the products. Trying alone can tell, and a first use warns of a future end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            packed = torch.fbgemm_pack_gemm_matrix_fp16(torch.ones(1, 1))
            return torch.fbgemm_linear_fp16_weight_fp32_activation(torch.ones(1, 1), packed, None).item() == 1.0
        except (AttributeError, RuntimeError, TypeError):
            return False


def pack_half(weight: Tensor) -> Tensor | None:
    """Lay a weight out for `multiply_half`; None where that is not available, as on a GPU, or would lose more than
    `ROUNDING`.

    Args:
        weight: [out_features, in_features] float32.
    Returns:
        An opaque handle in a tensor's clothes.
    """
    if not weight.is_cpu or not is_available() or not _fits_half(weight):
        return None
    packed: Tensor = torch.fbgemm_pack_gemm_matrix_fp16(weight.contiguous())
    return packed


def _fits_half(weight: Tensor) -> bool:
    return bool(((weight.half().float() - weight).abs() <= ROUNDING).all())  # false for NaN and what overflows


@cache
def _sums_few_rows_otherwise() -> bool:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(TILE_ROWS, 64, generator=generator), torch.randn(64, 64, generator=generator).half().float()
    packed = torch.fbgemm_pack_gemm_matrix_fp16(weight)
    return not torch.equal(_multiply(x[:1], packed), _multiply(x, packed)[:1])


def multiply_half(x: Tensor, packed: Tensor) -> Tensor:
    """x: [T, in_features] float32, at least one row -> [T, out_features].

    FBGEMM leaves the upper halves of the vector registers in use, which makes a matrix product of MKL four times as
    slow until any vector operation of torch has run. Callers that mix the two put one between (`settle`).
    """
    if not _sums_few_rows_otherwise():
        return _multiply(x, packed)
    num_rows = len(x)
    padded = max(num_rows, FEWEST_ROWS) if num_rows <= TILE_ROWS else ceil_to(TILE_ROWS, num_rows)
    return _multiply(pad(x, (0, 0, 0, padded - num_rows)), packed)[:num_rows]


def _multiply(x: Tensor, packed: Tensor) -> Tensor:
    out: Tensor = torch.fbgemm_linear_fp16_weight_fp32_activation(x, packed, None)
    return out


def settle(x: Tensor) -> Tensor:
    """A contiguous copy of x, made by vector instructions."""
    return x * constant(1.0)
