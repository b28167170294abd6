"""Reference of non-absorbed MLA attention: keys and values up-projected, one query row at a time, float64."""

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require, require_float, require_shape
from kimi_kernels.attention_batch import AttentionBatch
from kimi_kernels.linear.reference import per_head_linear
from kimi_kernels.paged_rows import read_slots, sequences_with_queries
from kimi_kernels.row_tiles import ceil_to_width


def mla_prefill(
    q: Tensor,
    latent_cache: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    batch: AttentionBatch,
    softmax_scale: float,
    kv_scale: float = 1.0,
) -> Tensor:
    """`signatures.MlaPrefill`.

    Raises:
        ValueError: the widths of q, latent_cache, w_uk and w_uv do not fit, or the batch does not fit them.
    """
    require_shape("latent_cache", latent_cache, None, None, None)
    block_size, latent_dim = latent_cache.shape[1:]
    require_shape("w_uk", w_uk, None, None, None)
    num_heads, nope_dim, kv_lora_rank = w_uk.shape
    require_shape("w_uv", w_uv, num_heads, kv_lora_rank, None)
    require(kv_lora_rank <= latent_dim, "w_uk", f"{kv_lora_rank} columns", f"at most latent_cache's {latent_dim}")
    require_shape("q", q, batch.num_tokens, num_heads, nope_dim + latent_dim - kv_lora_rank)
    require_float("q", q)
    out = torch.zeros(batch.num_tokens, num_heads, w_uv.shape[2], dtype=q.dtype, device=q.device)
    for sequence, first, num_rows, length in sequences_with_queries(batch, block_size):
        block_ids = batch.block_table[sequence, : -(-length // block_size)]
        latents = read_slots(latent_cache, block_ids, kv_scale)[:length]
        keys, values = up_project(latents, w_uk, w_uv)
        for row in range(first, first + num_rows):
            num_keys = length - (first + num_rows - 1 - row)
            if num_keys <= 0:
                continue
            query = q[row].double().unsqueeze(1).contiguous()
            scores = torch.bmm(query, keys[:, :num_keys].transpose(1, 2)) * softmax_scale
            out[row] = torch.bmm(scores.softmax(dim=-1), values[:, :num_keys]).squeeze(1)
    return out


def up_project(latents: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
    """Per-head keys and values of cached latents, in float64.

    Args:
        latents: [n, L + R] float32. w_uk: [N, P, L]. w_uv: [N, L, V].
    Returns:
        keys: [N, n, P + R]; values: [N, n, V]. Each head begins on a 64-byte boundary, whatever n.
    """
    num_keys = latents.shape[0]
    num_heads, nope_dim, kv_lora_rank = w_uk.shape
    kv_c = latents[:, None, :kv_lora_rank].expand(num_keys, num_heads, kv_lora_rank)
    rope_dim = latents.shape[1] - kv_lora_rank
    capacity = ceil_to_width(num_keys)
    keys = torch.empty(num_heads, capacity, nope_dim + rope_dim, dtype=torch.float64, device=latents.device)
    values = torch.empty(num_heads, capacity, w_uv.shape[2], dtype=torch.float64, device=latents.device)
    keys, values = keys[:, :num_keys], values[:, :num_keys]
    keys[..., :nope_dim] = per_head_linear(kv_c, w_uk.transpose(1, 2)).transpose(0, 1)
    keys[..., nope_dim:] = latents[:, kv_lora_rank:]
    values.copy_(per_head_linear(kv_c, w_uv).transpose(0, 1))
    return keys, values
