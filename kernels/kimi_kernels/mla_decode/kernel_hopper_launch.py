"""Launch of `attend_hopper_kernel`: descriptors and the choice of warps."""

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kimi_kernels.mla_decode.geometry import TILE_KEYS, DecodeGeometry
from kimi_kernels.mla_decode.kernel_hopper import attend_hopper_kernel

NUM_WARPS = {16: 4, 32: 4, 64: 8}
"""Warps by rows of a tile, for 16-bit latents."""
NUM_WARPS_FLOAT8 = 8
"""Twice as many where they also widen the latents."""


@functools.lru_cache(maxsize=16)
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def fits_hopper(q: Tensor, latent_cache: Tensor, kv_lora_rank: int) -> bool:
    """Whether `launch_hopper` takes this: Hopper, latents 512 + 64 wide, blocks of whole tiles."""
    return (
        _is_hopper(q.device)
        and latent_cache.dtype in (q.dtype, torch.float8_e4m3fn)
        and (kv_lora_rank, q.shape[2] - kv_lora_rank) == (512, 64)
        and latent_cache.shape[1] % TILE_KEYS == 0
    )


def launch_hopper(
    q: Tensor,
    latent_cache: Tensor,
    block_table: Tensor,
    records: Tensor,
    out: Tensor,
    lse: Tensor | None,
    part_out: Tensor,
    part_lse: Tensor,
    geometry: DecodeGeometry,
    kv_lora_rank: int,
    scale: float,
    kv_scale: float,
) -> None:
    """Launch `attend_hopper_kernel`; arguments as `attend_kernel` takes them."""
    block_size, latent_dim = latent_cache.shape[1:]
    rope_dim = latent_dim - kv_lora_rank
    half = kv_lora_rank // 2
    rows = geometry.tile_rows
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    queries = q.contiguous().view(-1, latent_dim)
    cache_rows = latent_cache.view(-1, latent_dim)
    narrow = latent_cache.dtype.itemsize == 1
    # A box of the copy engine's 128-byte swizzle: 64 rope columns fill only half of one in float8.
    latent_layout = gl.NVMMASharedLayout(128, 8, 2) if narrow else layout
    rope_layout = gl.NVMMASharedLayout(64, 8, 2) if narrow else layout
    num_warps = NUM_WARPS_FLOAT8 if narrow else NUM_WARPS[rows]
    attend_hopper_kernel[(geometry.num_teams * geometry.team_size,)](
        queries,
        TensorDescriptor.from_tensor(queries, [rows, half], layout),
        TensorDescriptor.from_tensor(queries, [rows, rope_dim], layout),
        TensorDescriptor.from_tensor(cache_rows, [TILE_KEYS, half], latent_layout),
        TensorDescriptor.from_tensor(cache_rows, [TILE_KEYS, rope_dim], rope_layout),
        block_table, records, out, lse, part_out, part_lse,
        block_table.stride(0), geometry.num_heads, geometry.num_teams, geometry.team_size,
        scale, kv_scale,
        L=kv_lora_rank, P=rope_dim, PAGE=block_size, R=rows, K=TILE_KEYS, SWAP=rows < 64,
        LSE=lse is not None, STAGES=2, WARPS=num_warps, num_warps=num_warps, launch_pdl=True,
    )  # fmt: skip
