"""The latent cache write as its words say: norm the latent, turn the key, write both at the slot, a token at a time."""

import torch
from torch import Tensor

from kimi_kernels.rms_norm.naive import rms_norm
from kimi_kernels.rope.naive import rope


def store_latent(
    kv_a: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    interleaved: bool,
    latent_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: float = 1.0,
) -> None:
    kv_c, k_pe = kv_a[:, : len(norm_weight)], kv_a[:, len(norm_weight) :]
    turned = rope(k_pe[:, None], cos_sin, positions, interleaved)[:, 0]
    rows = torch.cat([rms_norm(kv_c, norm_weight, eps), turned], dim=1) / kv_scale
    largest = torch.finfo(latent_cache.dtype).max
    for slot, row in zip(slot_mapping.tolist(), rows, strict=True):
        if slot >= 0:
            latent_cache.flatten(0, 1)[slot] = row.clamp(-largest, largest).to(latent_cache.dtype)
