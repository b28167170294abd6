"""Launches of the Hopper kernels: descriptors, warps and buffers."""

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kimi_kernels.hopper import is_hopper
from kimi_kernels.mla_decode.attend_call import AttendCall
from kimi_kernels.mla_decode.geometry import TILE_KEYS, DecodeGeometry
from kimi_kernels.mla_decode.kernel_hopper import attend_hopper_kernel
from kimi_kernels.mla_decode.kernel_hopper_float8_tiles import BOX
from kimi_kernels.mla_decode.kernel_hopper_pairs import attend_pairs_kernel

NUM_WARPS = {16: 4, 32: 4, 64: 8}
"""Warps by rows of a tile, for 16-bit latents."""
NUM_WARPS_FLOAT8 = 8
PAIRED_ROWS = 64
"""Rows of a tile in `attend_pairs_kernel`."""
FLOAT8_TILES = {16: (2, 2), 32: (2, 2), 64: (1, 3)}
"""(Boxes of 64 keys that are multiplied at once, buffers of so many) by rows of a tile, for float8 latents."""
WIDE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
HALF_WIDE = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)


def fits_hopper(q: Tensor, latent_cache: Tensor, kv_lora_rank: int) -> bool:
    """Tell whether `launch_hopper` takes this: Hopper, latents 512 + 64 wide, blocks of whole tiles."""
    return (
        is_hopper(q.device)
        and latent_cache.dtype in (q.dtype, torch.float8_e4m3fn)
        and (kv_lora_rank, q.shape[2] - kv_lora_rank) == (512, 64)
        and latent_cache.shape[1] % TILE_KEYS == 0
    )


def _takes_pairs(geometry: DecodeGeometry) -> bool:
    """Tell whether tiles of keys go in pairs: rows are bound by the products, or a token's heads fill a tile.

    Fewer rows start sooner one tile at a time. With fixed splits only heads decide, as a row's bits must not depend on
    the rows beside it.
    """
    if geometry.tile_rows < PAIRED_ROWS:
        return False
    return geometry.num_heads >= PAIRED_ROWS or (geometry.team_size > 1 and not geometry.split_tokens)


def launch_hopper(call: AttendCall) -> None:
    """Launch one of the Hopper kernels."""
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
    constants = {"L": kv_lora_rank, "P": rope_dim, "PAGE": block_size, "LSE": call.lse is not None, "launch_pdl": True}
    is_float8 = latent_cache.dtype != call.q.dtype
    describe = TensorDescriptor.from_tensor
    if is_float8:
        words, warps, (boxes, stages) = cache.view(torch.int16), NUM_WARPS_FLOAT8, FLOAT8_TILES[rows]
        inputs: tuple[object, ...] = (
            queries, cache, None, None, describe(words, [BOX.value, BOX.value], WIDE),
            describe(words, [BOX.value, rope_dim // 2], HALF_WIDE),
        )  # fmt: skip
    else:
        half, warps, boxes, stages = kv_lora_rank // 2, NUM_WARPS[rows], 1, 2
        inputs = (
            None, cache, describe(queries, [rows, half], WIDE), describe(queries, [rows, rope_dim], WIDE),
            describe(cache, [TILE_KEYS, half], WIDE), describe(cache, [TILE_KEYS, rope_dim], WIDE),
        )  # fmt: skip
        if _takes_pairs(geometry):
            attend_pairs_kernel[grid](*inputs[1:], *arguments, **constants, num_warps=4)
            return
    attend_hopper_kernel[grid](
        *inputs, *arguments, **constants, R=rows, FLOAT8=is_float8, BOXES=boxes, STAGES=stages,
        WARPS=warps, num_warps=warps,
    )  # fmt: skip
