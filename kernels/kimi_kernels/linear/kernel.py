"""The linear layers in Triton-language: tiles of int4 and fp8, made for few rows; a large plain weight that streams by
few rows (`kernel_stream`); other plain products and long prompts go to cuBLAS."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_kernels.argument_checks import require_dtype, require_float, require_shape
from kimi_kernels.linear.kernel_dequantize import dequantized_linear
from kimi_kernels.linear.kernel_heads import head_linear, takes_heads
from kimi_kernels.linear.kernel_stream import stream_linear
from kimi_kernels.linear.op import check_heads, check_linear
from kimi_kernels.linear.stream_launch import can_stream, new_arrivals, stream_launch
from kimi_kernels.quantization.kernel_tiles import TILE_ROWS, multiply_steps
from kimi_kernels.quantization.tiles import cut_tiles, identity_rows, step_columns
from kimi_kernels.weights import Fp8Weight, Int4Weight, LinearWeight, PackedWeight

PACKED_KINDS = {"triton.int4": "int4", "triton.fp8": "fp8"}
PLAIN_KIND = "triton.plain"
KINDS = {PLAIN_KIND, *PACKED_KINDS}
PROCESSORS = 132
MAX_SPLITS = 8
SPLIT_ROWS = 64
"""Most rows whose product is split along the weight's columns."""
DEQUANTIZED_ROWS = 1024
"""The fewest rows for which dequantising the whole weight for cuBLAS costs less than doing so anew for every 64
rows."""


@triton.jit
def tiled_linear_kernel(
    X,
    TILES,
    SCALES,
    OUT,
    PARTIALS,
    ARRIVALS,
    num_rows,
    x_stride,
    in_features,
    out_features,
    num_row_tiles,
    num_steps,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    PORTABLE: tl.constexpr,
):
    """One program a tile of COLUMNS rows of X, 128 rows of the weight and one of SPLITS ranges of the weight's columns.

    The last of a tile's programs to finish sums the partial products, always in the order of the ranges.

    Args:
        X: [num_rows, in_features]. OUT: [num_rows, out_features].
        PARTIALS: [tiles, SPLITS, 128, COLUMNS] float32, scratch. ARRIVALS: [tiles] int32, zero, and zero at the end.
    """
    program = tl.program_id(0)
    split = program % SPLITS
    # Programs of one row tile run side by side, so that one read of the weight serves all rows of X.
    num_tiles = tl.num_programs(0) // (num_row_tiles * SPLITS)
    tile = program // SPLITS % num_tiles
    row_tile = program // SPLITS // num_tiles
    x_row = tile * COLUMNS + tl.arange(0, COLUMNS)
    is_valid = x_row < num_rows
    first_tile = row_tile.to(tl.int64) * num_steps
    acc = multiply_steps(
        TILES + first_tile * (TILE_ROWS * WORDS),
        SCALES + first_tile * TILE_ROWS,
        (X + x_row.to(tl.int64) * x_stride,),
        (is_valid,),
        split * num_steps // SPLITS,
        (split + 1) * num_steps // SPLITS,
        in_features,
        KIND,
        WORDS,
        TILE_ROWS,
        COLUMNS,
        STAGES,
        SCALE_WEIGHTS,
        EVEN,
        PORTABLE,
    )[0]
    row = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    target = OUT + x_row.to(tl.int64)[None, :] * out_features + row[:, None]
    mask = is_valid[None, :] & (row < out_features)[:, None]
    if SPLITS == 1:
        tl.store(target, acc.to(OUT.dtype.element_ty), mask=mask)
    else:
        place = row_tile * num_tiles + tile
        offsets = tl.arange(0, TILE_ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        partials = PARTIALS + place.to(tl.int64) * (SPLITS * TILE_ROWS * COLUMNS) + offsets
        tl.store(partials + split * (TILE_ROWS * COLUMNS), acc)
        # Every thread's store must come before the count that announces it.
        tl.debug_barrier()
        if tl.atomic_add(ARRIVALS + place, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(ARRIVALS + place, 0)
            total = tl.zeros([TILE_ROWS, COLUMNS], tl.float32)
            for part in tl.static_range(SPLITS):
                # .cg: another multiprocessor wrote them, so this one's L1 must not answer.
                total += tl.load(partials + part * (TILE_ROWS * COLUMNS), cache_modifier=".cg")
            tl.store(target, total.to(OUT.dtype.element_ty), mask=mask)


def pack_linear(weight: LinearWeight) -> PackedWeight:
    """`PackLinear`: a quantised weight is cut into tiles, a plain one kept."""
    require_shape("weight", weight, None, None)
    out_features, in_features = weight.shape
    if isinstance(weight, Tensor):
        require_float("weight", weight)
        kind, tensors = PLAIN_KIND, (weight, *new_arrivals(weight))
    else:
        tiles = cut_tiles(_stacked(weight), identity_rows(out_features, weight.scales.device))
        arrivals = torch.zeros(tiles.tiles.shape[1], dtype=torch.int32, device=weight.scales.device)
        kind, tensors = f"triton.{tiles.kind}", (tiles.tiles, tiles.scales, arrivals)
    return PackedWeight(kind=kind, tensors=tensors, out_features=out_features, in_features=in_features)


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """`Linear`. One stream at a time may use a weight: it may hold scratch of its own."""
    check_linear(x, weight, KINDS)
    if weight.kind != PLAIN_KIND:
        return _quantised_product(x, weight, x.dtype)
    streamed = _streamed(x, weight, x.dtype)
    return torch.nn.functional.linear(x, weight.tensors[0]) if streamed is None else streamed


def logits(x: Tensor, weight: PackedWeight) -> Tensor:
    """`Logits`. A weight stored in bf16 is multiplied in bf16: products of two bf16 numbers are exact in float32, which
    they are summed in, so that widening both first would change nothing but the time."""
    check_linear(x, weight, KINDS)
    if weight.kind != PLAIN_KIND:
        return _quantised_product(x, weight, torch.float32)
    streamed = _streamed(x, weight, torch.float32)
    if streamed is not None:
        return streamed
    plain = weight.tensors[0]
    if x.is_cuda and x.dtype == plain.dtype != torch.float32:
        return torch.mm(x, plain.t(), out_dtype=torch.float32)
    return torch.nn.functional.linear(x.float(), plain.float())


def _quantised_product(x: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """x @ weight.T, summed in float32; dtype: of the result, x's or float32."""
    kind = PACKED_KINDS[weight.kind]
    if x.shape[0] == 0:
        return x.new_empty(0, weight.out_features, dtype=dtype)
    if x.shape[0] >= DEQUANTIZED_ROWS and dtype == x.dtype:
        return dequantized_linear(x, weight.tensors[0], weight.tensors[1], kind, weight.out_features)
    return _tiled_linear(x if x.stride(1) == 1 else x.contiguous(), weight, kind, dtype)


def _streamed(x: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor | None:
    """The product of few rows with a plain weight that streams; None for all others."""
    if len(weight.tensors) < 2 or not can_stream(x, weight.tensors[0]):
        return None
    launch = stream_launch(x.shape[0], weight.out_features)
    return stream_linear(x, weight.tensors[0], weight.tensors[1], launch, dtype)


def per_head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`PerHeadLinear`, for a weight of x's dtype: one batched product over the heads, of many rows by cuBLAS, written
    in the order of the result."""
    check_heads(x, weight)
    require_dtype("weight", weight, x.dtype)
    if takes_heads(x, weight):
        return head_linear(x, weight)
    out = x.new_empty(*x.shape[:2], weight.shape[2])
    if out.numel():
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out


def _tiled_linear(x: Tensor, weight: PackedWeight, kind: str, dtype: torch.dtype, stages: int = 4) -> Tensor:
    num_rows = x.shape[0]
    tiles, scales, arrivals = weight.tensors
    row_tiles, num_steps = tiles.shape[1:3]
    columns = min(64, max(8, triton.next_power_of_2(num_rows)))
    num_tiles = triton.cdiv(num_rows, columns)
    splits = _num_splits(num_tiles * row_tiles, num_steps) if num_rows <= SPLIT_ROWS else 1
    scratch = num_tiles * row_tiles * splits * 128 * columns if splits > 1 else 0
    partials = torch.empty(scratch, dtype=torch.float32, device=x.device)
    out = x.new_empty(num_rows, weight.out_features, dtype=dtype)
    tiled_linear_kernel[(num_tiles * row_tiles * splits,)](
        x,
        tiles,
        scales,
        out,
        partials,
        arrivals,
        num_rows,
        x.stride(0),
        weight.in_features,
        weight.out_features,
        row_tiles,
        num_steps,
        KIND=kind,
        WORDS=tiles.shape[-1],
        COLUMNS=columns,
        STAGES=stages if columns <= 16 else 3,
        SCALE_WEIGHTS=columns >= 32,
        SPLITS=splits,
        EVEN=weight.in_features % step_columns(kind) == 0,
        # The bit tricks make bf16; other types, and the CPU, take plain arithmetic.
        PORTABLE=x.dtype != torch.bfloat16 or x.device.type != "cuda",
    )
    return out


def _num_splits(num_programs: int, num_steps: int) -> int:
    """The least power of two that gives each multiprocessor a program, of at least four steps.

    More programs than that hide more latency, and pay more for it in partial sums: a gate_up of 36,864 rows takes 56 us
    in one range and 67 in two, a down_proj of 18,432 columns 31 us in four and 34 in eight (one row, int4).
    """
    splits = 1
    while splits < MAX_SPLITS and num_programs * splits < PROCESSORS and num_steps >= 8 * splits:
        splits *= 2
    return splits


def _stacked(weight: Int4Weight | Fp8Weight) -> LinearWeight:
    if isinstance(weight, Int4Weight):
        return Int4Weight(
            packed=weight.packed.unsqueeze(0), scales=weight.scales.unsqueeze(0), group_size=weight.group_size
        )
    return Fp8Weight(values=weight.values.unsqueeze(0), scales=weight.scales.unsqueeze(0), block_size=weight.block_size)
