"""The two rates that every floor is computed from, measured on the card at hand."""

import torch
import triton
import triton.language as tl

from kernel_cases import Ceilings

MIN_H100_READ = 3.0e6
"""Bytes a microsecond below which a run on an H100 is discarded: something else uses its memory."""
MIN_H100_MATMUL = 700e6
"""FLOP a microsecond below which a run on an H100 is discarded: its clock is held down."""
READ_BYTES = 4 << 30
MATMUL_SIZE = 8192
READ_WAYS = (
    (132 * 8, 4096, 4),
    (132 * 4, 8192, 4),
    (132 * 16, 4096, 1),
    (READ_BYTES // 4 // 16384, 16384, 1),
    (READ_BYTES // 4 // 8192, 8192, 1),
)
"""(programs, numbers a step, steps in flight)."""


@triton.jit
def _read_kernel(x, out, num_elements, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Read everything, write next to nothing."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(tl.program_id(0) * BLOCK, num_elements, tl.num_programs(0) * BLOCK, num_stages=STAGES):
        total += tl.load(x + start + tl.arange(0, BLOCK), eviction_policy="evict_first")
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def measure_ceilings() -> Ceilings:
    """Read 4 GB in the fastest of a few ways, multiply 8192 x 8192 x 8192 in bf16 on random data; medians of 15."""
    x = torch.randn(READ_BYTES // 4, device="cuda")
    out = torch.empty(x.numel() // 4096, device="cuda")
    read_us = min(
        _median_us(lambda p=p, b=b, s=s: _read_kernel[(p,)](x, out, x.numel(), BLOCK=b, STAGES=s, num_warps=8))
        for p, b, s in READ_WAYS
    )
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    matmul_us = _median_us(lambda: torch.mm(a, b))
    return Ceilings(
        read_bytes_per_us=READ_BYTES / read_us,
        matmul_flops_per_us=2 * MATMUL_SIZE**3 / matmul_us,
    )


def discard_reason(card: str, ceilings: Ceilings) -> str:
    """The reason why a run cannot be trusted; empty if it can."""
    if "H100" not in card:
        return ""
    if ceilings.read_bytes_per_us < MIN_H100_READ:
        return f"the probe reads {ceilings.read_bytes_per_us / 1e6:.2f} TB/s; an H100 reads at least 3.0"
    if ceilings.matmul_flops_per_us < MIN_H100_MATMUL:
        return f"the probe multiplies at {ceilings.matmul_flops_per_us / 1e6:.0f} TFLOP/s; an H100 at least at 700"
    return ""


def _median_us(call: object) -> float:
    times = []
    for _ in range(18):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()  # type: ignore[operator]
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times[3:])[7]
