"""Gather a chunk of every sequence's cached latents into rows side by side."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(
    do_not_specialize=["table_stride", "num_tokens", "num_seqs"],
    do_not_specialize_on_alignment=["block_table", "seq_lens"],
)
def gather_latents_kernel(
    cache,  # [cache rows, L + P]
    block_table,  # [seqs, max blocks] int32
    cu_seqlens_q,  # [seqs + 1] int32
    seq_lens,  # [seqs] int32
    latents,  # [seqs * chunk, L], row seq * chunk + i holds key start + i; 0 past the end of the sequence
    rope_keys,  # [seqs * chunk, P], likewise
    out,  # [tokens, OUT]; rows of no sequence become 0
    table_stride,
    start,
    chunk,
    num_seqs,
    num_tokens,
    out_width,
    kv_scale,
    L: tl.constexpr,
    P: tl.constexpr,
    PAGE: tl.constexpr,
    K: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program K rows of one sequence."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq = tl.program_id(1)
    index = tl.program_id(0) * K + tl.arange(0, K)
    key = start + index
    inside = (key < tl.load(seq_lens + seq)) & (index < chunk)
    block = tl.load(block_table + seq.to(tl.int64) * table_stride + key // PAGE, mask=inside, other=0).to(tl.int64)
    source = cache + ((block * PAGE + key % PAGE) * (L + P))[:, None]
    row = seq.to(tl.int64) * chunk + index
    column = tl.arange(0, L)[None, :]
    values = tl.load(source + column, mask=inside[:, None], other=0.0).to(tl.float32) * kv_scale
    tl.store(latents + row[:, None] * L + column, values.to(latents.dtype.element_ty), mask=(index < chunk)[:, None])
    column = tl.arange(0, P)[None, :]
    values = tl.load(source + L + column, mask=inside[:, None], other=0.0).to(tl.float32) * kv_scale
    tl.store(rope_keys + row[:, None] * P + column, values.to(latents.dtype.element_ty), mask=(index < chunk)[:, None])
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    for token in range(tl.load(cu_seqlens_q + num_seqs) + program, num_tokens, tl.num_programs(0) * tl.num_programs(1)):
        for first in range(0, out_width, OUT_BLOCK):
            place = first + tl.arange(0, OUT_BLOCK)
            zeros = tl.zeros([OUT_BLOCK], out.dtype.element_ty)
            tl.store(out + tl.cast(token, tl.int64) * out_width + place, zeros, mask=place < out_width)
