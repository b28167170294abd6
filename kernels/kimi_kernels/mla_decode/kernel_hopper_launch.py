"""Launches of the Hopper kernel: descriptors, warps and buffers."""

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kimi_kernels.mla_decode.attend_call import AttendCall
from kimi_kernels.mla_decode.geometry import TILE_KEYS
from kimi_kernels.mla_decode.kernel_hopper import attend_hopper_kernel
from kimi_kernels.mla_decode.kernel_hopper_float8_tiles import BOX

NUM_WARPS = {16: 4, 32: 4, 64: 8}
"""Warps by rows of a tile, for 16-bit latents."""
NUM_WARPS_FLOAT8 = 8
FLOAT8_TILES = {16: (2, 2), 32: (2, 2), 64: (1, 3)}
"""(Boxes of 64 keys that are multiplied at once, buffers of so many) by rows of a tile, for float8 latents."""
WIDE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
HALF_WIDE = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)


@functools.lru_cache(maxsize=16)
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def fits_hopper(q: Tensor, latent_cache: Tensor, kv_lora_rank: int) -> bool:
    """Tell whether `launch_hopper` takes this: Hopper, latents 512 + 64 wide, blocks of whole tiles."""
    return (
        _is_hopper(q.device)
        and latent_cache.dtype in (q.dtype, torch.float8_e4m3fn)
        and (kv_lora_rank, q.shape[2] - kv_lora_rank) == (512, 64)
        and latent_cache.shape[1] % TILE_KEYS == 0
    )


def launch_hopper(call: AttendCall) -> None:
    """Launch the Hopper kernel."""
    latent_cache, block_table, geometry = call.latent_cache, call.batch.block_table, call.geometry
    num_blocks, block_size, latent_dim = latent_cache.shape
    kv_lora_rank, rows = call.kv_lora_rank, geometry.tile_rows
    rope_dim = latent_dim - kv_lora_rank
    queries = call.q.contiguous().view(-1, latent_dim)
    cache = latent_cache.view(-1, latent_dim)
    grid = (geometry.num_teams * geometry.team_size,)
    arguments = (
        block_table, call.row_keys, call.records, call.out, call.lse, call.part_out, call.part_lse,
        block_table.stride(0), *block_table.shape, num_blocks, geometry.num_heads, geometry.num_teams,
        geometry.team_size, call.scale, call.kv_scale,
    )  # fmt: skip
    is_float8 = latent_cache.dtype != call.q.dtype
    if is_float8:
        words, warps, (boxes, stages) = cache.view(torch.int16), NUM_WARPS_FLOAT8, FLOAT8_TILES[rows]
        key_boxes, layouts = ([BOX.value, BOX.value], [BOX.value, rope_dim // 2]), (WIDE, HALF_WIDE)
    else:
        words, warps, boxes, stages = cache, NUM_WARPS[rows], 1, 2
        key_boxes, layouts = ([TILE_KEYS, kv_lora_rank // 2], [TILE_KEYS, rope_dim]), (WIDE, WIDE)
    describe = TensorDescriptor.from_tensor
    attend_hopper_kernel[grid](
        queries if is_float8 else None,
        cache,
        None if is_float8 else describe(queries, [rows, kv_lora_rank // 2], WIDE),
        None if is_float8 else describe(queries, [rows, rope_dim], WIDE),
        *(describe(words, box, layout) for box, layout in zip(key_boxes, layouts, strict=True)),
        *arguments, L=kv_lora_rank, P=rope_dim, PAGE=block_size, R=rows, FLOAT8=is_float8, LSE=call.lse is not None,
        BOXES=boxes, STAGES=stages, WARPS=warps, num_warps=warps, launch_pdl=True,
    )  # fmt: skip
