"""The latent cache write in float32. Scaled caches and other dtypes run on the reference."""

import torch
from torch import Tensor

from kimi_kernels.paged_rows import has_padding
from kimi_kernels.rms_norm.cpu import inverse_rms
from kimi_kernels.rope.cpu import rotate
from kimi_kernels.store_latent import reference


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
    """`signatures.StoreLatent`.

    Raises:
        ValueError: the widths of kv_a, norm_weight, cos_sin and latent_cache do not fit, or the cache is not
            contiguous.
    """
    num_tokens, latent_dim = kv_a.shape
    kv_lora_rank = norm_weight.shape[0]
    fits = (
        cos_sin.shape[1] == latent_dim - kv_lora_rank > 0
        and latent_cache.shape[2:] == (latent_dim,)
        and latent_cache.is_contiguous()
        and len(positions) == len(slot_mapping) == num_tokens
    )
    is_plain = kv_scale == 1.0 and kv_a.dtype == norm_weight.dtype == cos_sin.dtype == torch.float32
    if not fits or not is_plain or latent_cache.itemsize == 1:
        reference.store_latent(
            kv_a, norm_weight, eps, cos_sin, positions, interleaved, latent_cache, slot_mapping, kv_scale
        )
        return
    latents, k_pe = torch.split(kv_a, [kv_lora_rank, latent_dim - kv_lora_rank], dim=1)
    normed = (latents * inverse_rms(latents, eps)).mul_(norm_weight)
    rotated = rotate(k_pe.unsqueeze(1), cos_sin, positions, interleaved).squeeze(1)
    rows = torch.cat((normed, rotated), dim=1)
    write_rows(latent_cache.view(-1, latent_dim), slot_mapping, rows)


def write_rows(slots: Tensor, slot_mapping: Tensor, rows: Tensor) -> None:
    """Write row t to `slots[slot_mapping[t]]`, in place; a negative slot writes nothing.

    Args:
        slots: [num_blocks * block_size, ...]. slot_mapping: [T] int64. rows: [T, ...].
    """
    if has_padding(slot_mapping):
        kept = slot_mapping >= 0
        slot_mapping, rows = slot_mapping[kept], rows[kept]
    slots.index_copy_(0, slot_mapping, rows if rows.dtype == slots.dtype else rows.to(slots.dtype))
