"""The launch of `kernel_hopper`."""

import math
from dataclasses import dataclass

import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kimi_kernels.attention_batch import AttentionBatch
from kimi_kernels.hopper import is_hopper
from kimi_kernels.mla_prefill.kernel_hopper import WARPS, attend_hopper_kernel

WIDE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
WARPGROUP_ROWS, TILE_KEYS, STAGES = 64, 128, 2
TILE_ROWS = 2 * WARPGROUP_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The chunk of keys that a launch attends to, and what chunks leave for the next."""

    start: int
    """First key."""
    chunk: int
    """Keys of each sequence, whole tiles."""
    state_out: Tensor | None
    """[tokens, heads, v] float32; None where there is one chunk only."""
    state_lse: Tensor | None
    """[tokens, heads] float32."""
    is_first: bool
    is_last: bool


def fits_hopper(q: Tensor, nope_dim: int, rope_dim: int, v_dim: int) -> bool:
    """Tell whether `attend_hopper` takes this: Hopper, heads as wide as Kimi-K2's."""
    return is_hopper(q.device) and (nope_dim, rope_dim, v_dim) == (128, 64, 128)


def attend_hopper(
    q: Tensor,
    k_nope: Tensor,
    rope_keys: Tensor,
    values: Tensor,
    batch: AttentionBatch,
    softmax_scale: float,
    part: Part,
    out: Tensor,
) -> None:
    """Launch the kernel over one chunk of up-projected keys and values."""
    num_heads, (nope_dim, v_dim), rope_dim = q.shape[1], (k_nope.shape[1], values.shape[1]), rope_keys.shape[1]
    num_tiles = triton.cdiv(max(1, batch.max_query_len), TILE_ROWS)
    num_seqs = batch.seq_lens.shape[0]
    attend_hopper_kernel[(num_heads, num_tiles, num_seqs)](
        q,
        TensorDescriptor.from_tensor(k_nope, [TILE_KEYS, nope_dim], WIDE),
        TensorDescriptor.from_tensor(rope_keys, [TILE_KEYS, rope_dim], WIDE),
        TensorDescriptor.from_tensor(values, [TILE_KEYS, v_dim], WIDE),
        batch.cu_seqlens_q, batch.seq_lens, part.state_out, part.state_lse, out, q.stride(0), q.stride(1), part.start,
        part.chunk, num_seqs, num_heads, num_tiles, softmax_scale * math.log2(math.e),
        P=nope_dim, Q=rope_dim, V=v_dim, R=WARPGROUP_ROWS, K=TILE_KEYS, FIRST=part.is_first, LAST=part.is_last,
        STAGES=STAGES, PDL=True, num_warps=WARPS.value, launch_pdl=True,
    )  # fmt: skip
