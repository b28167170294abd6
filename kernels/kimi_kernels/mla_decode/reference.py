"""Reference of absorbed MLA attention: one query row at a time over exactly its own keys.

Shapes: N heads (NP: padded to 16), D = L + R, n keys of the row. The shapes that the BLAS sees depend on N and n only.
On a GPU, where a launch takes longer than a row, many rows are one batched product (`reference_batched`).
"""

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require, require_float, require_shape
from kimi_kernels.attention_batch import AttentionBatch, DecodePlan
from kimi_kernels.mla_decode.reference_batched import attend_batched
from kimi_kernels.mla_decode.reference_rows import attend_rows
from kimi_kernels.row_tiles import ceil_to_width


def plan_mla_decode(batch: AttentionBatch, num_heads: int, block_size: int, split_tokens: int = 0) -> DecodePlan | None:
    """No plan: the reference divides nothing (`signatures.PlanMlaDecode`)."""
    return None


def mla_decode(
    q: Tensor,
    latent_cache: Tensor,
    batch: AttentionBatch,
    kv_lora_rank: int,
    softmax_scale: float,
    kv_scale: float = 1.0,
    return_lse: bool = False,
    row_keys: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`signatures.MlaDecode`.

    Raises:
        ValueError: q and latent_cache differ in width, or the batch or its rows' keys do not fit them.
    """
    require_shape("latent_cache", latent_cache, None, None, None)
    latent_dim = latent_cache.shape[2]
    require_shape("q", q, batch.num_tokens, None, latent_dim)
    require_float("q", q)
    require(0 < kv_lora_rank <= latent_dim, "kv_lora_rank", kv_lora_rank, f"1 to {latent_dim}")
    num_tokens, num_heads, _ = q.shape
    padded_heads = ceil_to_width(num_heads)
    q_tiles = torch.zeros(num_tokens, padded_heads, latent_dim, dtype=torch.float32, device=q.device)
    torch.mul(q.float(), softmax_scale, out=q_tiles[:, :num_heads])
    out_tiles = torch.zeros(num_tokens, padded_heads, kv_lora_rank, dtype=torch.float32, device=q.device)
    lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float32, device=q.device) if return_lse else None
    attend = attend_batched if q.is_cuda else attend_rows
    attend(q_tiles, latent_cache, batch, kv_scale, out_tiles, lse, row_keys)
    return out_tiles[:, :num_heads].to(q.dtype).contiguous(), lse
