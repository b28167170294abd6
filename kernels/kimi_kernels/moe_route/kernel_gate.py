"""`router_logits` in Triton-language: one launch for few rows, which reads its weight while the kernel before it ends.

A gate is small (5.5 MB) and stands alone on the way to the experts, so what counts is latency: every program holds its
whole part of the weight in registers before it waits for the rows, multiplies once, and the last program of a tile sums
the parts in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kimi_kernels.argument_checks import require, require_float, require_shape
from kimi_kernels.early_start import starts_early
from kimi_kernels.linear.kernel import PLAIN_KIND, pack_linear
from kimi_kernels.weights import PackedWeight, Weight

GATE_KIND = "triton.gate"
EXPERTS = 32
COLUMNS = 512
"""Of the weight, a program: with 384 experts of 7168 columns, 168 programs for 132 multiprocessors."""
MOST_ROWS = 64


@triton.jit
def gate_kernel(
    x,  # [num_rows, width]
    gate,  # [num_experts, width]
    out,  # [num_rows, num_experts] float32
    partials,  # [splits, num_rows, num_experts] float32
    arrivals,  # [tiles of experts] int32, zero, and zero at the end
    num_rows,
    x_stride,
    width,
    num_experts,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program EXPERTS experts and COLUMNS columns."""
    if PDL:
        gdc_launch_dependents()
    tile, split = tl.program_id(0), tl.program_id(1)
    expert = tile * EXPERTS + tl.arange(0, EXPERTS)
    column = split * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    is_column = column < width
    weight = tl.load(
        gate + expert[:, None] * width + column[None, :],
        mask=(expert < num_experts)[:, None] & is_column[None, :],
        other=0.0,
    )
    if PDL:
        gdc_wait()
    values = tl.load(
        x + row[:, None].to(tl.int64) * x_stride + column[None, :],
        mask=(row < num_rows)[:, None] & is_column[None, :],
        other=0.0,
    )
    # Products of two 16-bit numbers are exact in float32, which they are summed in.
    product = tl.dot(values, tl.trans(weight))
    place = row[:, None] * num_experts + expert[None, :]
    mask = (row < num_rows)[:, None] & (expert < num_experts)[None, :]
    if SPLITS == 1:
        tl.store(out + place, product, mask=mask)
    else:
        part_size = num_rows * num_experts
        tl.store(partials + split * part_size + place, product, mask=mask)
        # Every thread's store must come before the count that announces it.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrivals + tile, 0)
            total = tl.zeros([ROWS, EXPERTS], tl.float32)
            for part in tl.static_range(SPLITS):
                # .cg: another multiprocessor wrote them, so this one's L1 must not answer.
                total += tl.load(partials + part * part_size + place, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(out + place, total, mask=mask)


def pack_gate(weight: Weight) -> PackedWeight:
    """Keep a gate as it is, with the counts that its product needs (`signatures.PackGate`).

    Raises:
        ValueError: the gate is not a matrix of floats.
    """
    require(isinstance(weight, Tensor), "gate", "a quantised weight", "a plain one")
    plain = pack_linear(weight)
    matrix = plain.tensors[0]
    if matrix.dtype == torch.float32:
        return plain
    arrivals = torch.zeros(triton.cdiv(plain.out_features, EXPERTS), dtype=torch.int32, device=matrix.device)
    return PackedWeight(
        kind=GATE_KIND,
        tensors=(matrix.contiguous(), arrivals),
        out_features=plain.out_features,
        in_features=plain.in_features,
    )


def router_logits(x: Tensor, gate: PackedWeight) -> Tensor:
    """`signatures.RouterLogits`. One stream at a time may use a gate: it holds the counts of its parts.

    Raises:
        ValueError: x is not [T, in_features], or the gate was packed by another kernel set.
    """
    require_shape("x", x, None, gate.in_features)
    require_float("x", x)
    require(gate.kind in (GATE_KIND, PLAIN_KIND), "gate", f"a weight packed as {gate.kind!r}", repr(GATE_KIND))
    weight = gate.tensors[0]
    if x.dtype != weight.dtype or gate.kind == PLAIN_KIND:
        return torch.nn.functional.linear(x.float(), weight.float())
    if x.shape[0] > MOST_ROWS:
        return torch.mm(x, weight.t(), out_dtype=torch.float32) if x.is_cuda else (x.float() @ weight.float().t())
    return _few_rows(x if x.stride(1) == 1 else x.contiguous(), weight, gate.tensors[1])


def _few_rows(x: Tensor, weight: Tensor, arrivals: Tensor) -> Tensor:
    num_rows, width = x.shape
    num_experts = weight.shape[0]
    out = torch.empty(num_rows, num_experts, dtype=torch.float32, device=x.device)
    if not num_rows:
        return out
    splits = triton.cdiv(width, COLUMNS)
    partials = torch.empty(splits if splits > 1 else 0, num_rows, num_experts, dtype=torch.float32, device=x.device)
    early = starts_early(x.device)
    gate_kernel[(triton.cdiv(num_experts, EXPERTS), splits)](
        x, weight, out, partials, arrivals, num_rows, x.stride(0), width, num_experts,
        ROWS=max(16, triton.next_power_of_2(num_rows)), EXPERTS=EXPERTS, COLUMNS=COLUMNS, SPLITS=splits, PDL=early,
        num_warps=4, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out
