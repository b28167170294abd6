"""Multi-head attention as its formula says, in float64: a row at a time, over its own keys."""

import torch
from torch import Tensor

from kimi_kernels.attention_batch import AttentionBatch
from kimi_kernels.mla_decode.naive import sequences


def store_kv(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: float = 1.0) -> None:
    largest = torch.finfo(kv_cache.dtype).max
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            rows = torch.stack([k[token], v[token]]).double() / kv_scale
            kv_cache.flatten(1, 2)[:, slot] = rows.clamp(-largest, largest).to(kv_cache.dtype)


def mha_attention(
    q: Tensor,
    kv_cache: Tensor,
    batch: AttentionBatch,
    softmax_scale: float,
    sliding_window: int | None,
    kv_scale: float = 1.0,
) -> Tensor:
    out, group = torch.zeros(q.shape, dtype=torch.float64), q.shape[1] // kv_cache.shape[3]
    cache = (kv_cache.double() * kv_scale).permute(1, 2, 0, 3, 4).repeat_interleave(group, dim=3)
    for tokens, rows in sequences(cache, batch):
        for row, num_keys in rows:
            first = 0 if sliding_window is None else max(0, num_keys - sliding_window)
            keys, values = tokens[first:num_keys].unbind(dim=1)
            scores = softmax_scale * torch.einsum("nd,knd->nk", q[row].double(), keys)
            out[row] = torch.einsum("nk,knd->nd", scores.softmax(dim=1), values)
    return out
