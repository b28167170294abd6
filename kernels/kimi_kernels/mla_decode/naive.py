"""Absorbed MLA attention as its formula says, in float64: a row at a time, over its own keys."""

import torch
from torch import Tensor

from kimi_kernels.attention_batch import AttentionBatch


def sequences(
    cache: Tensor, batch: AttentionBatch, row_keys: Tensor | None = None
) -> list[tuple[Tensor, list[tuple[int, int]]]]:
    """A sequence's tokens out of its blocks, in order, and each of its query rows with how many of them it sees."""
    starts, found = batch.cu_seqlens_q.tolist(), []
    for sequence, length in enumerate(batch.seq_lens.tolist()):
        blocks = batch.block_table[sequence, : -(-length // cache.shape[1])].long()
        rows = range(starts[sequence], starts[sequence + 1])
        seen = [max(0, length - (rows.stop - 1 - row)) if row_keys is None else int(row_keys[row]) for row in rows]
        found.append((cache[blocks].flatten(0, 1), list(zip(rows, seen, strict=True))))
    return found


def mla_decode(
    q: Tensor,
    latent_cache: Tensor,
    batch: AttentionBatch,
    kv_lora_rank: int,
    softmax_scale: float,
    kv_scale: float = 1.0,
    row_keys: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    out = torch.zeros(*q.shape[:2], kv_lora_rank, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for tokens, rows in sequences(latent_cache.double() * kv_scale, batch, row_keys):
        for row, num_keys in rows:
            keys = tokens[:num_keys]
            scores = softmax_scale * torch.einsum("nd,kd->nk", q[row].double(), keys)
            lse[row] = scores.logsumexp(dim=1)
            out[row] = torch.einsum("nk,kl->nl", scores.softmax(dim=1), keys[:, :kv_lora_rank])
    return out, lse
