"""Weights fetched into the L2 cache ahead of the product that reads them.

A decode step of few rows is a chain of kernels of which only the large products keep the memory busy; while queries are
rotated, attention runs or a row is normed, it idles. A kernel that knows which weight comes next asks for a part of it:
the request returns at once, and the product then finds that part in the cache. Nothing is read twice.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kimi_kernels.early_start import starts_early
from kimi_kernels.weights import PackedWeight

CHUNK_BYTES = 1024
LINE_BYTES = 128
LANES = tl.constexpr(128)
"""Chunks that a program asks for, one a thread of its four warps."""
MOST_ROWS = 64
"""Steps of more rows leave the memory no time to fetch ahead, and stream more keys through the cache."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a launch fetches, as the kernel's arguments."""

    weight: torch.Tensor
    stride: int
    """Bytes between chunks: they are spread over the weight, because the product's thread blocks read all of it at
    once, each its own part from the start."""
    num_bytes: int
    """0 fetches nothing."""


def fetch_ahead(upcoming: PackedWeight | None, num_rows: int, num_programs: int, device: torch.device) -> Ahead | None:
    """What `num_programs` programs shall ask for; None where that gains nothing or cannot be done."""
    if upcoming is None or num_rows > MOST_ROWS or not starts_early(device):
        return None
    weight = upcoming.tensors[0]
    num_bytes = weight.numel() * weight.element_size()
    stride = num_bytes // (num_programs * LANES.value) // LINE_BYTES * LINE_BYTES
    return Ahead(weight, max(stride, CHUNK_BYTES), num_bytes) if num_bytes >= CHUNK_BYTES else None


@triton.jit
def prefetch_chunks(weight, program, stride, num_bytes):
    """Ask for this program's LANES chunks of `weight`; four warps."""
    chunk = program * LANES + tl.arange(0, LANES)
    offset = tl.minimum(chunk.to(tl.int64) * stride, num_bytes - 1024)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 1024; mov.u32 $0, 0;",
        "=r,l",
        [weight.to(tl.int64) + offset // 16 * 16],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
