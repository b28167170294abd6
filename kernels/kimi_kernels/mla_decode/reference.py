"""Reference of absorbed MLA attention: one query row at a time over exactly its own keys.

Shapes: N heads (NP: padded to 16), D = L + R, n keys of the row. The shapes that the BLAS sees depend on N and n only.
"""

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require, require_float, require_shape
from kimi_kernels.attention_batch import AttentionBatch, DecodePlan
from kimi_kernels.paged_rows import read_slots, sequences_with_queries
from kimi_kernels.row_tiles import ceil_to_tile


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
) -> tuple[Tensor, Tensor | None]:
    """`signatures.MlaDecode`.

    Raises:
        ValueError: q and latent_cache differ in width, or the batch does not fit them.
    """
    require_shape("latent_cache", latent_cache, None, None, None)
    block_size, latent_dim = latent_cache.shape[1:]
    require_shape("q", q, batch.num_tokens, None, latent_dim)
    require_float("q", q)
    require(0 < kv_lora_rank <= latent_dim, "kv_lora_rank", kv_lora_rank, f"1 to {latent_dim}")
    num_tokens, num_heads, _ = q.shape
    padded_heads = ceil_to_tile(num_heads)
    q_tiles = torch.zeros(num_tokens, padded_heads, latent_dim, dtype=torch.float32, device=q.device)
    torch.mul(q.float(), softmax_scale, out=q_tiles[:, :num_heads])
    out_tiles = torch.zeros(num_tokens, padded_heads, kv_lora_rank, dtype=torch.float32, device=q.device)
    q_rows, out_rows = q_tiles.unbind(), out_tiles.unbind()
    lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float32, device=q.device) if return_lse else None
    for sequence, first, num_rows, length in sequences_with_queries(batch, block_size):
        block_ids = batch.block_table[sequence, : -(-length // block_size)]
        latents = read_slots(latent_cache, block_ids, kv_scale)
        keys_t, values = latents.t(), latents[:, :kv_lora_rank]
        for row in range(first, first + num_rows):
            num_keys = length - (first + num_rows - 1 - row)
            if num_keys <= 0:
                continue
            scores = torch.mm(q_rows[row], keys_t[:, :num_keys])
            probs = scores.softmax(dim=-1, dtype=torch.float64).float()
            torch.mm(probs, values[:num_keys], out=out_rows[row])
            if lse is not None:
                lse[row] = log_sum_exp(scores[:num_heads])
    return out_tiles[:, :num_heads].to(q.dtype).contiguous(), lse


def log_sum_exp(scores: Tensor) -> Tensor:
    """[N, n] -> [N], natural log of the sum of exponentials, in float64."""
    wide = scores.double()
    largest = wide.amax(dim=-1)
    return largest + (wide - largest.unsqueeze(-1)).exp().sum(dim=-1).log()
