"""`mla_decode` compiled, in bf16 and float8 at Kimi-K2's widths, against its formula in float64 on the CPU."""

import dataclasses

import pytest
import torch
from torch import Tensor

from kimi_kernels.attention_batch import AttentionBatch
from kimi_kernels.mla_decode import kernel, naive
from support.attention_cases import PagedCase, paged_case, random_contents
from support.attention_shards import merge_shards, shards_of
from support.row_errors import worst_row_error

pytestmark = pytest.mark.gpu
LORA_RANK, ROPE_DIM = 512, 64
LATENT_DIM = LORA_RANK + ROPE_DIM
SCALE = 192**-0.5
ERROR_LIMIT = 6e-3
"""norm(error) / norm(row): weights and result rounded to bf16, 2^-9 each."""
LSE_LIMIT = 2e-3
SEQ_LENS = [700, 0, 64, 1, 129, 3000, 63, 65]
QUERY_LENS = [4, 1, 0, 1, 8, 2, 4, 3]


def on_gpu(batch: AttentionBatch) -> AttentionBatch:
    return dataclasses.replace(
        batch,
        cu_seqlens_q=batch.cu_seqlens_q.cuda(),
        seq_lens=batch.seq_lens.cuda(),
        block_table=batch.block_table.cuda(),
    )


def inputs(case: PagedCase, num_heads: int) -> tuple[Tensor, Tensor]:
    q = torch.randn(case.batch.num_tokens, num_heads, LATENT_DIM).to(torch.bfloat16)
    contents = random_contents([len(slots) for slots in case.slots], LATENT_DIM)
    return q, case.cache(contents).to(torch.bfloat16)


def check(
    case: PagedCase, num_heads: int, *, split_tokens: int = 0, dtype: torch.dtype = torch.bfloat16, kv_scale: float = 1
) -> Tensor:
    q, cache = inputs(case, num_heads)
    cache = (cache.float() / kv_scale).to(dtype)
    expected, expected_lse = naive.mla_decode(q, cache, case.batch, LORA_RANK, SCALE, kv_scale)
    batch = on_gpu(case.batch)
    plan = kernel.plan_mla_decode(batch, num_heads, case.block_size, split_tokens)
    batch = dataclasses.replace(batch, decode_plan=plan)
    out, lse = kernel.mla_decode(q.cuda(), cache.cuda(), batch, LORA_RANK, SCALE, kv_scale, return_lse=True)
    assert lse is not None
    assert worst_row_error(out, expected) < ERROR_LIMIT
    finite = expected_lse.isfinite()
    assert torch.equal(lse.cpu().isfinite(), finite)
    assert (lse.cpu()[finite] - expected_lse[finite]).abs().max() < LSE_LIMIT
    assert torch.equal(out.cpu()[~finite], torch.zeros_like(out.cpu()[~finite]))
    return out


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("num_heads", [1, 5, 8, 16, 32, 64, 128])
def test_a_ragged_batch(num_heads: int, block_size: int) -> None:
    check(paged_case(QUERY_LENS, SEQ_LENS, block_size, padding_rows=2), num_heads)


@pytest.mark.parametrize("num_rows", range(1, 9))
@pytest.mark.parametrize("num_heads", [8, 16])
def test_every_number_of_rows(num_heads: int, num_rows: int) -> None:
    check(paged_case([num_rows] * 3, [1000, 61 + num_rows, num_rows], 64), num_heads)


@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("num_heads", [2, 8, 16, 64])
def test_float8(num_heads: int, block_size: int) -> None:
    check(paged_case(QUERY_LENS, SEQ_LENS, block_size), num_heads, dtype=torch.float8_e4m3fn, kv_scale=0.02)


def test_float8_in_pieces_of_an_odd_number_of_tiles() -> None:
    check(paged_case([4, 4], [64 * 331, 64 * 7 - 3], 64), 8, dtype=torch.float8_e4m3fn, kv_scale=0.02)
    check(paged_case([4] * 3, [700, 193, 3000], 64), 8, split_tokens=192, dtype=torch.float8_e4m3fn, kv_scale=0.02)


@pytest.mark.parametrize("num_heads", [8, 64])
def test_fixed_splits(num_heads: int) -> None:
    check(paged_case(QUERY_LENS, SEQ_LENS, 64), num_heads, split_tokens=256)


def test_many_short_sequences() -> None:
    lengths = torch.randint(0, 300, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    check(paged_case([1] * 200, lengths, 64), 8)


def test_blocks_past_two_to_the_31_elements() -> None:
    num_blocks = 66_000  # of 64 x 576 elements; ids past 16 bits too
    case = paged_case([4, 1], [200, 64], 64)
    q, cache = inputs(case, 8)
    pool = torch.full((num_blocks, 64, LATENT_DIM), torch.nan, dtype=torch.bfloat16, device="cuda")
    shift = num_blocks - cache.shape[0]
    pool[shift:] = cache.cuda()
    table = case.batch.block_table.clone()
    table[table < num_blocks] += shift
    batch = on_gpu(dataclasses.replace(case.batch, block_table=table))
    out, _ = kernel.mla_decode(q.cuda(), pool, batch, LORA_RANK, SCALE)
    expected, _ = naive.mla_decode(q, cache, case.batch, LORA_RANK, SCALE)
    assert worst_row_error(out, expected) < ERROR_LIMIT


def test_a_graph_follows_lengths_on_the_device_and_repeats_itself() -> None:
    case = paged_case([2] * 4, [700, 300, 64, 1500], 64)
    q, cache = inputs(case, 8)
    q, cache, batch = q.cuda(), cache.cuda(), on_gpu(case.batch)

    def step() -> Tensor:
        plan = kernel.plan_mla_decode(batch, 8, 64)
        return kernel.mla_decode(q, cache, dataclasses.replace(batch, decode_plan=plan), LORA_RANK, SCALE)[0]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ([700, 300, 64, 1500], [2, 300, 0, 900], [64, 65, 63, 1499]):
        batch.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        first = out.clone()
        graph.replay()
        assert torch.equal(out, first)
        plain = dataclasses.replace(case.batch, seq_lens=torch.tensor(lengths, dtype=torch.int32))
        expected, _ = naive.mla_decode(q.cpu(), cache.cpu(), plain, LORA_RANK, SCALE)
        assert worst_row_error(first, expected) < ERROR_LIMIT


@pytest.mark.parametrize(("num_heads", "num_shards"), [(8, 2), (16, 4), (64, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_shards_add_up_in_a_graph(dtype: torch.dtype, num_heads: int, num_shards: int) -> None:
    """Every alignment of four rows to the shards; numbers of keys and lengths follow the device."""
    kv_scale = 1.0 if dtype == torch.bfloat16 else 0.02
    longest = [0, 1, 3, *range(1000, 1000 + num_shards), 3000]
    case = paged_case([4] * len(longest), longest, 64, padding_rows=2)
    contents = [(content / kv_scale).to(dtype).float() for content in random_contents(longest, LATENT_DIM)]
    q = torch.randn(case.batch.num_tokens, num_heads, LATENT_DIM).to(torch.bfloat16)
    shards = shards_of(case, contents, num_shards, 1)
    caches = [shard.case.cache(shard.contents).to(dtype).cuda() for shard in shards]
    batches, counts = [on_gpu(shard.case.batch) for shard in shards], [shard.row_keys.cuda() for shard in shards]
    rows = q.cuda()

    def step() -> list[tuple[Tensor, Tensor | None]]:
        found = []
        for cache, batch, row_keys in zip(caches, batches, counts, strict=True):
            planned = dataclasses.replace(batch, decode_plan=kernel.plan_mla_decode(batch, num_heads, 64))
            found.append(kernel.mla_decode(rows, cache, planned, LORA_RANK, SCALE, kv_scale, True, row_keys))
        return found

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        parts = step()
    for fewer in (0, 5, 997):
        seen = [max(0, length - fewer) for length in longest]
        whole = dataclasses.replace(case.batch, seq_lens=torch.tensor(seen, dtype=torch.int32))
        left = [content[:length] for content, length in zip(contents, seen, strict=True)]
        shorter = shards_of(dataclasses.replace(case, batch=whole), left, num_shards, 1)
        for batch, row_keys, shard in zip(batches, counts, shorter, strict=True):
            batch.seq_lens.copy_(shard.case.batch.seq_lens)
            row_keys.copy_(shard.row_keys)
        graph.replay()
        outs, lses = zip(*parts, strict=True)
        out, lse = merge_shards(outs, lses)
        expected, expected_lse = naive.mla_decode(q, case.cache(contents), whole, LORA_RANK, SCALE, kv_scale)
        assert worst_row_error(out.cpu(), expected) < ERROR_LIMIT
        finite = expected_lse.isfinite()
        assert torch.equal(lse.cpu().isfinite(), finite)
        assert (lse.cpu()[finite] - expected_lse[finite]).abs().max() < LSE_LIMIT
