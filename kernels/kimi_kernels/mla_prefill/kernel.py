"""`mla_prefill` in Triton-language: per chunk of keys gather latents, up-project them (cuBLAS), attend, carry on."""

import math

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kimi_kernels.argument_checks import require, require_dtype
from kimi_kernels.attention_batch import AttentionBatch
from kimi_kernels.dependent_launch import pdl_options
from kimi_kernels.kernel_interpreter import INTERPRETED, math_dtype
from kimi_kernels.mla_prefill.kernel_attend import attend_kernel
from kimi_kernels.mla_prefill.kernel_gather import gather_latents_kernel
from kimi_kernels.mla_prefill.kernel_hopper_launch import Part, attend_hopper, fits_hopper
from kimi_kernels.mla_prefill.op import check_prefill

CHUNK_ROWS = 1 << 19 if not INTERPRETED else 1024
"""Rows of all heads and sequences up-projected at a time: 0.27 GB of keys and values."""
TILE_ROWS = 128
TILE_KEYS = 64
CHUNK_STEP = 128
"""Keys of a chunk are a multiple of this: whole tiles, of either kernel."""
ATTEND_WARPS, ATTEND_STAGES = 8, 3
GATHER_ROWS = 16
MAX_ROWS = 2**31 - 1
"""Descriptor coordinates are int32."""


def mla_prefill(
    q: Tensor,
    latent_cache: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    batch: AttentionBatch,
    softmax_scale: float,
    kv_scale: float = 1.0,
) -> Tensor:
    """`MlaPrefill`, of bf16 and float16, for widths that are powers of two. Chunks are as long for every sequence, so a
    batch of like lengths wastes least."""
    check_prefill(q, latent_cache, w_uk, w_uv, batch, softmax_scale, kv_scale)
    _check_limits(q, latent_cache, w_uk, w_uv)
    num_tokens, num_heads, _ = q.shape
    out = torch.empty(num_tokens, num_heads, w_uv.shape[2], dtype=q.dtype, device=q.device)
    num_seqs = batch.seq_lens.shape[0]
    if not num_tokens or not num_seqs or not batch.max_seq_len:
        return out.zero_()
    most = max(CHUNK_STEP, CHUNK_ROWS // (num_seqs * num_heads) // CHUNK_STEP * CHUNK_STEP)
    chunk = min(most, triton.cdiv(batch.max_seq_len, CHUNK_STEP) * CHUNK_STEP)
    num_chunks = triton.cdiv(batch.max_seq_len, chunk)
    state_out = state_lse = None
    if num_chunks > 1:
        state_out = torch.empty(out.shape, dtype=torch.float32, device=q.device)
        state_lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    for index in range(num_chunks):
        part = Part(
            start=index * chunk,
            chunk=chunk,
            state_out=state_out,
            state_lse=state_lse,
            is_first=index == 0,
            is_last=index == num_chunks - 1,
        )
        latents, rope_keys = _gather(latent_cache, w_uk.shape[2], batch, part.start, chunk, kv_scale, out)
        k_nope, values = _up_project(latents, w_uk, w_uv)
        fits = fits_hopper(q, k_nope.shape[1], rope_keys.shape[1], values.shape[1])
        (attend_hopper if fits else _attend)(q, k_nope, rope_keys, values, batch, softmax_scale, part, out)
    return out


def _gather(
    latent_cache: Tensor,
    kv_lora_rank: int,
    batch: AttentionBatch,
    start: int,
    chunk: int,
    kv_scale: float,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """Latents [seqs * chunk, L] and rope keys [seqs * chunk, R] of a chunk; clears `out`'s rows of no sequence."""
    num_seqs, rope_dim = batch.seq_lens.shape[0], latent_cache.shape[2] - kv_lora_rank
    latents = torch.empty(num_seqs * chunk, kv_lora_rank, dtype=out.dtype, device=out.device)
    rope_keys = torch.empty(num_seqs * chunk, rope_dim, dtype=out.dtype, device=out.device)
    out_width = out.shape[1] * out.shape[2]
    gather_latents_kernel[(triton.cdiv(chunk, GATHER_ROWS), num_seqs)](
        latent_cache, batch.block_table, batch.cu_seqlens_q, batch.seq_lens, latents, rope_keys, out,
        batch.block_table.stride(0), start, chunk, num_seqs, out.shape[0] if start == 0 else 0, out_width, kv_scale,
        L=kv_lora_rank, P=rope_dim, PAGE=latent_cache.shape[1], K=GATHER_ROWS,
        OUT_BLOCK=min(2048, triton.next_power_of_2(out_width)), num_warps=4, **pdl_options(out.device),
    )  # fmt: skip
    return latents, rope_keys


def _up_project(latents: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [heads * rows, nope] and values [heads * rows, v] of latents [rows, L]."""
    num_heads, nope_dim, _ = w_uk.shape
    require(
        num_heads * latents.shape[0] <= MAX_ROWS, "q", f"{num_heads} heads over {latents.shape[0]} rows", "fewer rows"
    )
    every_head = latents.unsqueeze(0).expand(num_heads, -1, -1)
    k_nope = torch.bmm(every_head, w_uk.transpose(1, 2)).view(-1, nope_dim)
    return k_nope, torch.bmm(every_head, w_uv).view(-1, w_uv.shape[2])


def _attend(
    q: Tensor,
    k_nope: Tensor,
    rope_keys: Tensor,
    values: Tensor,
    batch: AttentionBatch,
    softmax_scale: float,
    part: Part,
    out: Tensor,
) -> None:
    """Launch `attend_kernel` over one chunk of up-projected keys and values."""
    (nope_dim, v_dim), rope_dim = (k_nope.shape[1], values.shape[1]), rope_keys.shape[1]
    num_heads, num_seqs = q.shape[1], batch.seq_lens.shape[0]
    num_tiles = triton.cdiv(max(1, batch.max_query_len), TILE_ROWS)
    attend_kernel[(num_heads, num_tiles, num_seqs)](
        q,
        TensorDescriptor.from_tensor(k_nope, [TILE_KEYS, nope_dim]),
        TensorDescriptor.from_tensor(rope_keys, [TILE_KEYS, rope_dim]),
        TensorDescriptor.from_tensor(values, [TILE_KEYS, v_dim]),
        batch.cu_seqlens_q, batch.seq_lens, part.state_out, part.state_lse, out, q.stride(0), q.stride(1), part.start,
        part.chunk, num_seqs, num_heads, num_tiles, softmax_scale * math.log2(math.e),
        P=nope_dim, Q=rope_dim, V=v_dim, R=TILE_ROWS, K=TILE_KEYS, FIRST=part.is_first, LAST=part.is_last,
        MATH=math_dtype(q.dtype), STAGES=ATTEND_STAGES, num_warps=ATTEND_WARPS, num_stages=ATTEND_STAGES,
        **pdl_options(q.device),
    )  # fmt: skip


def _check_limits(q: Tensor, latent_cache: Tensor, w_uk: Tensor, w_uv: Tensor) -> None:
    """Raise at what the kernels do not take."""
    require_dtype("q", q, torch.bfloat16, torch.float16, *([torch.float32] if INTERPRETED else []))
    require_dtype("latent_cache", latent_cache, q.dtype, torch.float8_e4m3fn)
    require_dtype("w_uk", w_uk, q.dtype)
    require_dtype("w_uv", w_uv, q.dtype)
    _, nope_dim, kv_lora_rank = w_uk.shape
    rope_dim, v_dim = latent_cache.shape[2] - kv_lora_rank, w_uv.shape[2]
    widths = {"w_uk": nope_dim, "kv_lora_rank": kv_lora_rank, "rope width": rope_dim, "w_uv": v_dim}
    for name, width in {**widths, "block_size": latent_cache.shape[1]}.items():
        require(width >= 16 and width & (width - 1) == 0, name, f"width {width}", "a power of two from 16 up")
