"""The latent cache write in torch."""

import torch
from torch import Tensor

from kimi_kernels.paged_rows import write_slots
from kimi_kernels.rms_norm.plain import normalize
from kimi_kernels.rope.plain import rotate
from kimi_kernels.store_latent.op import check_store_latent


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
    """`StoreLatent`."""
    check_store_latent(kv_a, norm_weight, cos_sin, positions, latent_cache, slot_mapping)
    kv_c, k_pe = kv_a.tensor_split([norm_weight.numel()], dim=1)
    if k_pe.dtype != torch.float32:
        k_pe = k_pe.float()
    normed = normalize(kv_c, norm_weight, eps)
    rotated = rotate(k_pe.unsqueeze(1), cos_sin, positions, interleaved).squeeze(1)
    rows = torch.cat((normed, rotated), dim=1)
    write_slots(latent_cache.view(-1, kv_a.shape[1]), slot_mapping, rows, kv_scale)
