# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""`silu_down` of a narrow layer in Triton-language: every program activates the rows anew, and a launch is saved."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kimi_kernels.compositions import composed_silu_down
from kimi_kernels.dependent_launch import pdl_options
from kimi_kernels.linear.kernel import PLAIN_KIND, linear
from kimi_kernels.silu_mul.kernel import silu_mul
from kimi_kernels.silu_mul.op import check_silu_down
from kimi_kernels.weights import PackedWeight

MOST_ROWS = 256
MOST_WIDTH = 256
"""Widest layers: a program keeps TILE_ROWS rows of the weight in registers."""
TILE_ROWS = 64
_composed = composed_silu_down(silu_mul, linear)


@triton.jit(do_not_specialize=["num_tokens"])
def silu_down_kernel(
    gate_up,  # [T, 2 * width], last dimension contiguous
    weight,  # [out_features, width]
    out,  # [T, out_features]
    num_tokens,
    stride,
    width,
    out_features,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program TILE rows of the weight and ROWS rows of gate_up."""
    if PDL:
        gdc_launch_dependents()
    silu_down_tile(
        gate_up, weight, out, tl.program_id(0), tl.program_id(1), num_tokens, stride, width, out_features, ROWS, TILE,
        WIDTH, PDL,
    )  # fmt: skip


@triton.jit
def silu_down_tile(
    gate_up, weight, out, tile, row_block, num_tokens, stride, width, out_features, ROWS: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program of `silu_down_kernel`. Every value is rounded where the ops round it."""
    feature = tile * TILE + tl.arange(0, TILE)
    column = tl.arange(0, WIDTH)
    inside = column < width
    values = tl.load(
        weight + feature.to(tl.int64)[:, None] * width + column[None, :],
        mask=(feature < out_features)[:, None] & inside[None, :],
        other=0.0,
    )
    if PDL:
        gdc_wait()
    dtype: tl.constexpr = out.dtype.element_ty
    row = row_block * ROWS + tl.arange(0, ROWS)
    source = gate_up + row.to(tl.int64)[:, None] * stride + column[None, :]
    mask = (row < num_tokens)[:, None] & inside[None, :]
    gate = tl.load(source, mask=mask, other=0.0).to(dtype).to(tl.float32)
    up = tl.load(source + width, mask=mask, other=0.0).to(dtype).to(tl.float32)
    hidden = (gate * tl.sigmoid(gate) * up).to(dtype)
    product = tl.dot(values, tl.trans(hidden), input_precision="ieee")
    target = out + row.to(tl.int64)[None, :] * out_features + feature[:, None]
    tl.store(target, product.to(dtype), mask=(row < num_tokens)[None, :] & (feature < out_features)[:, None])


@dataclass(frozen=True, slots=True)
class NarrowTiles:
    """The cut of a narrow layer's second product into programs."""

    tiles: int
    row_blocks: int
    constants: dict[str, int]
    """ROWS, TILE and WIDTH."""


def narrow_tiles(gate_up: Tensor, weight: PackedWeight, dtype: torch.dtype) -> NarrowTiles | None:
    """None where the layer is not narrow, its weight another's, or there are no rows or too many."""
    check_silu_down(gate_up, weight)
    num_tokens, width = gate_up.shape[0], weight.in_features
    is_narrow = weight.kind == PLAIN_KIND and weight.tensors[0].dtype == dtype and width <= MOST_WIDTH
    if not is_narrow or not 0 < num_tokens <= MOST_ROWS or not weight.tensors[0].is_contiguous():
        return None
    rows = min(64, max(16, triton.next_power_of_2(num_tokens)))
    return NarrowTiles(
        tiles=triton.cdiv(weight.out_features, TILE_ROWS),
        row_blocks=triton.cdiv(num_tokens, rows),
        constants={"ROWS": rows, "TILE": TILE_ROWS, "WIDTH": max(16, triton.next_power_of_2(width))},
    )


def silu_down(gate_up: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """`SiluDown`. Wide layers, many rows and quantised weights take a launch for each of the ops."""
    cut = narrow_tiles(gate_up, weight, dtype)
    if cut is None:
        return _composed(gate_up, weight, dtype)
    num_tokens, width = gate_up.shape[0], weight.in_features
    out = torch.empty(num_tokens, weight.out_features, dtype=dtype, device=gate_up.device)
    silu_down_kernel[(cut.tiles, cut.row_blocks)](
        gate_up, weight.tensors[0], out, num_tokens, gate_up.stride(0), width, weight.out_features, num_warps=4,
        **cut.constants, **pdl_options(gate_up.device),
    )  # fmt: skip
    return out
