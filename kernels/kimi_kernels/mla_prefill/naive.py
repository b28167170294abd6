"""Non-absorbed MLA attention as its formula says, in float64: keys and values of all heads, a row at a time."""

import torch
from torch import Tensor

from kimi_kernels.attention_batch import AttentionBatch
from kimi_kernels.mla_decode.naive import sequences


def mla_prefill(
    q: Tensor,
    latent_cache: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    batch: AttentionBatch,
    softmax_scale: float,
    kv_scale: float = 1.0,
) -> Tensor:
    num_heads, _, kv_lora_rank = w_uk.shape
    out = torch.zeros(q.shape[0], num_heads, w_uv.shape[2], dtype=torch.float64)
    for tokens, rows in sequences(latent_cache.double() * kv_scale, batch):
        kv_c, k_pe = tokens[:, :kv_lora_rank], tokens[:, kv_lora_rank:]
        k_nope = torch.einsum("kl,npl->nkp", kv_c, w_uk.double())
        keys = torch.cat([k_nope, k_pe.expand(num_heads, -1, -1)], dim=2)
        values = torch.einsum("kl,nlv->nkv", kv_c, w_uv.double())
        for row, num_keys in rows:
            scores = softmax_scale * torch.einsum("np,nkp->nk", q[row].double(), keys[:, :num_keys])
            out[row] = torch.einsum("nk,nkv->nv", scores.softmax(dim=1), values[:, :num_keys])
    return out
