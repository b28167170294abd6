"""`plan_mla_decode` and `mla_decode` in Triton-language: scratch and launches around the kernels."""

import math

import torch
import triton
from torch import Tensor

from kimi_kernels.argument_checks import refuse, require, require_dtype
from kimi_kernels.attention_batch import AttentionBatch, DecodePlan, check_block_table
from kimi_kernels.dependent_launch import has_dependent_launch
from kimi_kernels.kernel_interpreter import INTERPRETED, math_dtype, num_processors
from kimi_kernels.mla_decode.attend_call import AttendCall
from kimi_kernels.mla_decode.geometry import TILE_KEYS, TritonDecodePlan, decode_geometry
from kimi_kernels.mla_decode.kernel_attend import attend_kernel, merge_kernel
from kimi_kernels.mla_decode.kernel_hopper_launch import fits_hopper, launch_hopper
from kimi_kernels.mla_decode.kernel_plan import ENTRY, RECORD, plan_balanced_kernel, plan_fixed_kernel
from kimi_kernels.mla_decode.op import check_decode

SEGMENT_COST = 3
"""A segment costs about as much as this many key tiles besides its own: start, query rows, result."""
PIECE_SLACK = 108
"""Percent of its fair share that a team may get so that it has one piece only, and nothing is cut twice."""
MERGE_ELEMENTS = 4096
"""Numbers a merging program reads at a time, or twice as many."""
MOST_MERGED = 128
"""Pieces that a merging program reads at a time."""
MERGE_PROGRAMS = 4
"""Merging programs that a multiprocessor holds beside the attending ones."""
FLOAT8 = torch.float8_e4m3fn


def plan_mla_decode(batch: AttentionBatch, num_heads: int, block_size: int, split_tokens: int = 0) -> DecodePlan | None:
    """`PlanMlaDecode`: one small kernel, its grid from host values, so that a CUDA graph may hold it.

    With `split_tokens` the scratch of `mla_decode` grows with `batch.max_seq_len`; balanced plans need a fixed amount.

    Raises:
        ValueError: `split_tokens` is not a multiple of 64.
    """
    check_block_table(batch)
    num_seqs = batch.seq_lens.shape[0]
    if num_seqs == 0 or batch.num_tokens == 0:
        return None
    device = batch.seq_lens.device
    geometry = decode_geometry(
        num_heads=num_heads,
        block_size=block_size,
        num_seqs=num_seqs,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        split_tokens=split_tokens,
        num_processors=num_processors(device),
    )
    records = torch.empty(geometry.num_records, RECORD.value, dtype=torch.int32, device=device)
    entries = torch.empty(1 + geometry.max_items, ENTRY.value, dtype=torch.int32, device=device)
    arguments = (batch.cu_seqlens_q, batch.seq_lens, records, entries, num_seqs, num_heads, geometry.num_teams)
    shape = {
        "SEQS": triton.next_power_of_2(num_seqs),
        "ROWS": geometry.tile_rows,
        "KEYS": geometry.tile_keys,
        "TEAM": geometry.team_size,
    }
    if split_tokens:
        plan_fixed_kernel[(geometry.num_teams,)](*arguments, **shape, SPLIT=split_tokens // TILE_KEYS, num_warps=1)
    else:
        plan_balanced_kernel[(geometry.num_teams,)](
            *arguments, **shape, COST=SEGMENT_COST, SLACK=PIECE_SLACK, num_warps=1
        )
    return TritonDecodePlan(tensors=(records, entries), geometry=geometry)


def mla_decode(
    q: Tensor,
    latent_cache: Tensor,
    batch: AttentionBatch,
    kv_lora_rank: int,
    softmax_scale: float,
    kv_scale: float = 1.0,
    return_lse: bool = False,
    row_keys: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`MlaDecode`, of bf16 and float16, for widths that are powers of two."""
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
    call = attend_pieces(q, latent_cache, batch, kv_lora_rank, softmax_scale, kv_scale, lse, row_keys)
    if call is None:
        return torch.empty(*q.shape[:2], kv_lora_rank, dtype=q.dtype, device=q.device), lse
    merge_pieces(call)
    return call.out, lse


def attend_pieces(
    q: Tensor,
    latent_cache: Tensor,
    batch: AttentionBatch,
    kv_lora_rank: int,
    softmax_scale: float,
    kv_scale: float,
    lse: Tensor | None = None,
    row_keys: Tensor | None = None,
) -> AttendCall | None:
    """`mla_decode` but for `merge_pieces`; None where there is nothing to attend."""
    check_decode(q, latent_cache, batch, kv_lora_rank, softmax_scale, kv_scale, row_keys)
    _check_limits(q, latent_cache, kv_lora_rank)
    num_tokens, num_heads, _ = q.shape
    out = torch.empty(num_tokens, num_heads, kv_lora_rank, dtype=q.dtype, device=q.device)
    plan = batch.decode_plan or plan_mla_decode(batch, num_heads, latent_cache.shape[1])
    if plan is None:
        return None
    if not isinstance(plan, TritonDecodePlan):
        refuse("batch.decode_plan", f"a {type(plan).__name__}", "one that this kernel set made")
    geometry = plan.geometry
    require(
        (geometry.num_heads, geometry.block_size) == (num_heads, latent_cache.shape[1]),
        "batch.decode_plan",
        f"for {geometry.num_heads} heads and blocks of {geometry.block_size}",
        f"one for {num_heads} heads and blocks of {latent_cache.shape[1]}",
    )
    rows = geometry.num_slots * geometry.team_size * geometry.tile_rows
    part_out = torch.empty(rows, kv_lora_rank, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(rows, dtype=torch.float32, device=q.device)
    records, entries = plan.tensors
    call = AttendCall(
        q=q,
        latent_cache=latent_cache,
        batch=batch,
        row_keys=row_keys,
        geometry=geometry,
        records=records,
        entries=entries,
        out=out,
        lse=lse,
        part_out=part_out,
        part_lse=part_lse,
        kv_lora_rank=kv_lora_rank,
        scale=softmax_scale * kv_scale * math.log2(math.e),
        kv_scale=kv_scale,
    )
    if fits_hopper(q, latent_cache, kv_lora_rank):
        launch_hopper(call)
    else:
        _launch_attend(call)
    return call


def _launch_attend(call: AttendCall) -> None:
    q, geometry, block_table = call.q, call.geometry, call.batch.block_table
    block_size, latent_dim = call.latent_cache.shape[1:]
    swapped = geometry.tile_rows < 64
    dtype = math_dtype(q.dtype, reads_float8=call.latent_cache.dtype == FLOAT8)
    attend_kernel[(geometry.num_teams * geometry.team_size,)](
        q, call.latent_cache, block_table, call.row_keys, call.records, call.out, call.lse, call.part_out,
        call.part_lse, q.stride(0), q.stride(1), block_table.stride(0), geometry.num_heads, geometry.num_teams,
        geometry.team_size, call.scale, call.kv_scale,
        L=call.kv_lora_rank, P=latent_dim - call.kv_lora_rank, PAGE=block_size, R=geometry.tile_rows, K=TILE_KEYS,
        SWAP=swapped, LSE=call.lse is not None,
        MATH=dtype, STAGES=2, num_warps=4 if swapped else 8, num_stages=2,
    )  # fmt: skip


def merge_pieces(call: AttendCall) -> None:
    """Add up the parts of sequences that were cut, into `call.out`; padding rows become 0."""
    out, geometry = call.out, call.geometry
    num_tokens, num_heads, kv_lora_rank = out.shape
    tile_rows = geometry.team_size * geometry.tile_rows
    if geometry.split_tokens:
        # Always merged in the same order, whatever the batch.
        rows, pieces, columns = 1, 8, min(kv_lora_rank, MERGE_ELEMENTS // 8)
    else:
        # Few sequences are cut into many pieces: read them all at once, and share a row's columns among programs. Many
        # are cut into few or none: no more programs than run at once, or they would wait for each other only to end.
        pieces = min(MOST_MERGED, triton.next_power_of_2(max(2, geometry.num_teams // geometry.max_items)))
        columns = min(kv_lora_rank, MERGE_ELEMENTS // pieces)
        most_programs = MERGE_PROGRAMS * num_processors(out.device)
        fair = geometry.max_items * tile_rows * (kv_lora_rank // columns) // most_programs
        rows = max(1, min(triton.next_power_of_2(max(1, fair)), 2 * MERGE_ELEMENTS // (pieces * columns), tile_rows))
    early = has_dependent_launch(out.device)
    merge_kernel[(geometry.max_items, tile_rows // rows, kv_lora_rank // columns)](
        call.part_out, call.part_lse, call.entries, call.batch.cu_seqlens_q, out, call.lse,
        call.batch.seq_lens.shape[0], num_tokens, num_heads, geometry.team_size, L=kv_lora_rank, COLUMNS=columns,
        R=geometry.tile_rows, ROWS=rows, SLOTS=pieces, BALANCED=geometry.split_tokens == 0, LSE=call.lse is not None,
        PDL=early, num_warps=4, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def _check_limits(q: Tensor, latent_cache: Tensor, kv_lora_rank: int) -> None:
    """Raise at what the kernels do not take."""
    require_dtype("q", q, torch.bfloat16, torch.float16, *([torch.float32] if INTERPRETED else []))
    require_dtype("latent_cache", latent_cache, q.dtype, FLOAT8)
    for name, width in (
        ("kv_lora_rank", kv_lora_rank),
        ("q", q.shape[2] - kv_lora_rank),
        ("latent_cache", latent_cache.shape[1]),
    ):
        require(width >= 16 and width & (width - 1) == 0, name, f"width {width}", "a power of two from 16 up")
