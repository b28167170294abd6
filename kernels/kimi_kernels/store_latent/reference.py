"""Reference of the latent cache write."""

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require, require_float, require_shape
from kimi_kernels.paged_rows import write_slots
from kimi_kernels.rms_norm.reference import normalize
from kimi_kernels.rope.reference import check_rotation, rotate


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
    require_shape("norm_weight", norm_weight, None)
    require_shape("kv_a", kv_a, None, None)
    require_float("kv_a", kv_a)
    num_tokens, latent_dim = kv_a.shape
    kv_lora_rank = norm_weight.shape[0]
    require(latent_dim > kv_lora_rank, "kv_a", f"{latent_dim} columns", f"more than norm_weight's {kv_lora_rank}")
    check_rotation("cos_sin", cos_sin, latent_dim - kv_lora_rank, positions, num_tokens)
    require_shape("latent_cache", latent_cache, None, None, latent_dim)
    require(latent_cache.is_contiguous(), "latent_cache", f"strides {latent_cache.stride()}", "a contiguous tensor")
    kv_c = normalize(kv_a[:, :kv_lora_rank], norm_weight, eps).float()
    k_pe = rotate(kv_a[:, kv_lora_rank:], cos_sin.index_select(0, positions), interleaved)
    rows = torch.cat((kv_c, k_pe), dim=-1)
    write_slots(latent_cache.view(-1, latent_dim), slot_mapping, rows if kv_scale == 1.0 else rows / kv_scale)
