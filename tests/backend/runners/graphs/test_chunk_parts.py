"""Chunks cut into parts: their lengths, and that attention over them is attention over the whole."""

import numpy as np
import pytest
import torch

from kimi_backend.runners.graphs.buckets import Bucket, prompt_buckets, smallest_fitting
from kimi_backend.runners.graphs.chunk_parts import ChunkParts, excess_products, is_worth_cutting
from kimi_backend.runners.row_arrays import RowArrays
from kimi_backend.types.plan import RowPlan
from kimi_kernels.attention_batch import AttentionBatch
from kimi_kernels.mla_decode import kernel_values
from kimi_kernels.mla_prefill import naive
from support.attention_cases import PagedCase, paged_case, random_contents
from support.interpreted import INTERPRETED
from support.row_errors import worst_row_error

pytestmark = INTERPRETED
HEADS, NOPE, ROPE, RANK, VALUE, SCALE = 8, 16, 16, 32, 32, 0.2


def row_plan(query_lens: list[int], seq_lens: list[int], table: np.ndarray | None = None) -> RowPlan:  # type: ignore[type-arg]
    return RowPlan(
        token_ids=np.zeros(sum(query_lens), np.int32),
        query_lens=np.array(query_lens, np.int32),
        seq_lens=np.array(seq_lens, np.int32),
        block_table=np.zeros((len(query_lens), 1), np.int32) if table is None else table,
    )


def cut(rows: RowPlan, bucket: Bucket) -> ChunkParts:
    return ChunkParts.of(rows, RowArrays.of(rows, 1 << 30), bucket)


def prompt_bucket(num_rows: int, num_seqs: int, num_heads: int | None) -> Bucket:
    bucket = smallest_fitting(prompt_buckets(num_seqs, 2048, num_heads), num_seqs, num_rows, num_rows)
    assert bucket is not None
    return bucket


def test_a_part_sees_what_its_last_row_sees() -> None:
    parts = cut(row_plan([1, 20, 8, 9], [100, 50, 8, 39]), prompt_bucket(38, 4, 8))
    assert parts.sequence.tolist() == [0, 1, 1, 1, 2, 3, 3]
    assert parts.ends.tolist() == [1, 9, 17, 21, 29, 37, 38]
    assert parts.seq_lens.tolist() == [100, 38, 46, 50, 8, 38, 39]


def test_a_decode_step_is_not_cut() -> None:
    parts = cut(row_plan([4, 1, 3], [100, 50, 8]), Bucket.of(4, 4))
    assert parts.ends.tolist() == [4, 5, 8]
    assert parts.seq_lens.tolist() == [100, 50, 8]


@pytest.mark.parametrize("num_heads", [1, 4, 6, 8, 16, 64, 128, None])
def test_a_bucket_has_room_for_the_parts_of_any_step(num_heads: int | None) -> None:
    generator = np.random.default_rng(0)
    for bucket in prompt_buckets(12, 2048, num_heads):
        for num_seqs in (1, 5, 12):
            cuts = np.sort(generator.choice(np.arange(1, bucket.num_rows), num_seqs - 1, replace=False))
            query_lens = np.diff([0, *cuts, bucket.num_rows]).tolist()
            parts = cut(row_plan(query_lens, query_lens), bucket)
            assert len(parts.ends) <= bucket.num_parts
            assert np.diff([0, *parts.ends]).max() <= bucket.query_len
            assert parts.ends[-1] == bucket.num_rows


def test_only_many_rows_over_many_keys_multiply_more() -> None:
    assert excess_products(row_plan([170, 1], [10**6, 10**6]), 8) == 0
    assert excess_products(row_plan([270], [10_135]), 8) == 100 * 10_000 * 8
    assert excess_products(row_plan([2048], [10**6]), None) == 0


@pytest.mark.parametrize(("num_rows", "num_keys"), [(2048, 13_400), (512, 73_584), (256, 292_625)])
def test_chunks_that_would_multiply_much_more_stay_whole(num_rows: int, num_keys: int) -> None:
    """The bound is 192 * 2^20 rows * keys * heads: with 8 heads so many keys at the chunk's middle."""
    bucket = prompt_bucket(num_rows, 1, 8)
    for more, is_worth in ((0, True), (1, False)):
        assert is_worth_cutting(row_plan([num_rows], [num_keys + num_rows // 2 + more]), bucket, 8) == is_worth
    assert is_worth_cutting(row_plan([1], [10**6]), Bucket.of(1, 1), 8)


def test_prompt_buckets_begin_at_16_rows() -> None:
    sizes = [2048, 1536, 1024, 768, 512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16]
    assert [bucket.num_rows for bucket in prompt_buckets(4, 8192, 8)] == sizes
    assert [bucket.num_rows for bucket in prompt_buckets(4, 8192, 64)] == sizes[6:]


CASES = [
    paged_case([1, 20, 4, 1], [65, 70, 4, 130], 64),
    paged_case([37, 2], [37, 100], 16),
]


def attend_in_parts(case: PagedCase, q: torch.Tensor, cache: torch.Tensor, w_uk: torch.Tensor, w_uv: torch.Tensor,
                    num_more_keys: int = 0) -> torch.Tensor:  # fmt: skip
    """Attend as a bucket does, padding rows and parts included."""
    batch = case.batch
    query_lens = np.diff(batch.cu_seqlens_q.numpy()).tolist()
    rows = row_plan(query_lens, batch.seq_lens.tolist(), batch.block_table.numpy())
    bucket = prompt_bucket(batch.num_tokens, 5, HEADS)
    parts = cut(rows, bucket)
    missing = bucket.num_parts - len(parts.ends)
    ends = np.concatenate([[0], parts.ends, np.full(missing, parts.ends[-1])])
    in_parts = AttentionBatch(
        cu_seqlens_q=torch.from_numpy(ends).int(),
        seq_lens=torch.from_numpy(np.concatenate([parts.seq_lens + num_more_keys, np.zeros(missing, np.int32)])),
        block_table=torch.from_numpy(rows.block_table[np.concatenate([parts.sequence, np.zeros(missing, np.int64)])]),
        num_tokens=bucket.num_rows,
        max_query_len=bucket.query_len,
        max_seq_len=256,
    )
    latent = torch.cat([torch.einsum("tnp,npl->tnl", q[..., :NOPE], w_uk), q[..., NOPE:]], 2)
    padded = torch.cat([latent, torch.full((bucket.num_rows - len(q), *latent.shape[1:]), torch.nan)])
    return kernel_values.mla_values(padded, cache, in_parts, w_uv, SCALE)


@pytest.mark.parametrize("case", CASES)
def test_parts_attend_as_whole_chunks(case: PagedCase) -> None:
    """A part that saw a key too few or too many would show."""
    torch.manual_seed(1)
    cache = case.cache(random_contents([len(slots) for slots in case.slots], RANK + ROPE))
    q = torch.randn(case.batch.num_tokens, HEADS, NOPE + ROPE)
    w_uk, w_uv = torch.randn(HEADS, NOPE, RANK) / RANK**0.5, torch.randn(HEADS, RANK, VALUE) / RANK**0.5
    expected = naive.mla_prefill(q, cache, w_uk, w_uv, case.batch, SCALE)
    found = attend_in_parts(case, q, cache, w_uk, w_uv)
    assert worst_row_error(found[: len(q)], expected) < 5e-6
    assert not found[len(q) :].any()
    fewer = attend_in_parts(case, q, cache, w_uk, w_uv, -1)
    assert worst_row_error(fewer[: len(q)], expected) > 1e-2
