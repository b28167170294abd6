"""The reference of absorbed MLA attention against a naive float64 softmax over each row's keys."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from kimi_kernels.mla_decode.reference import mla_decode, plan_mla_decode
from support.attention_cases import PagedCase, paged_case, random_contents

SCALE = 0.17
# float32 scores of up to 50 terms; the softmax is float64.
TOLERANCE = 2e-5


def naive_decode(q: Tensor, contents: list[Tensor], case: PagedCase, kv_lora_rank: int) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _ = q.shape
    out = torch.zeros(num_tokens, num_heads, kv_lora_rank, dtype=torch.float64)
    lse = torch.full((num_tokens, num_heads), -math.inf, dtype=torch.float64)
    for row, sequence, num_keys in case.rows():
        keys = contents[sequence].double()[:num_keys].tolist()
        for head in range(num_heads if num_keys else 0):
            query = q[row, head].double().tolist()
            scores = [SCALE * sum(a * b for a, b in zip(query, key, strict=True)) for key in keys]
            weights = [math.exp(score - max(scores)) for score in scores]
            total = math.fsum(weights)
            for column in range(kv_lora_rank):
                values = [weight * key[column] for weight, key in zip(weights, keys, strict=True)]
                out[row, head, column] = math.fsum(values) / total
            lse[row, head] = max(scores) + math.log(total)
    return out, lse


def check(q: Tensor, contents: list[Tensor], case: PagedCase, kv_lora_rank: int) -> None:
    out, lse = mla_decode(q, case.cache(contents), case.batch, kv_lora_rank, SCALE, return_lse=True)
    assert lse is not None
    assert lse.dtype == torch.float32
    expected, expected_lse = naive_decode(q, contents, case, kv_lora_rank)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize(("num_heads", "kv_lora_rank", "rope_dim"), [(1, 4, 2), (4, 16, 8), (17, 7, 3)])
def test_a_ragged_batch_with_empty_sequences(block_size: int, num_heads: int, kv_lora_rank: int, rope_dim: int) -> None:
    seq_lens = [1, 0, 65, 3, 63, block_size, block_size + 1, 5]
    case = paged_case([1, 2, 4, 3, 0, 1, 8, 1], seq_lens, block_size, padding_rows=3)
    contents = random_contents(seq_lens, kv_lora_rank + rope_dim)
    q = torch.randn(case.batch.num_tokens, num_heads, kv_lora_rank + rope_dim)
    check(q, contents, case, kv_lora_rank)


@pytest.mark.parametrize("num_rows", [1, 3, 63, 65])
def test_many_rows_of_one_sequence(num_rows: int) -> None:
    case = paged_case([num_rows], [num_rows + 2])
    check(torch.randn(num_rows, 2, 6), random_contents([num_rows + 2], 6), case, 4)


def test_rows_before_the_first_key_give_zero() -> None:
    case = paged_case([5], [2])
    q, contents = torch.randn(5, 3, 6), random_contents([2], 6)
    check(q, contents, case, 4)
    out, lse = mla_decode(q, case.cache(contents), case.batch, 4, SCALE, return_lse=True)
    assert lse is not None
    assert torch.equal(out[:3], torch.zeros(3, 3, 4))
    assert (lse[:3] == -math.inf).all()


def test_no_rows_and_no_sequences() -> None:
    case = paged_case([], [])
    out, lse = mla_decode(torch.randn(0, 3, 6), torch.randn(2, 16, 6), case.batch, 4, SCALE)
    assert out.shape == (0, 3, 4)
    assert lse is None


def test_the_order_of_the_sequences_does_not_matter() -> None:
    seq_lens, query_lens = [40, 7, 65, 0, 20], [2, 1, 8, 1, 3]
    contents = random_contents(seq_lens, 6)
    case = paged_case(query_lens, seq_lens)
    q = torch.randn(case.batch.num_tokens, 3, 6)
    out, _ = mla_decode(q, case.cache(contents), case.batch, 4, SCALE)
    order = [3, 1, 4, 0, 2]
    rows = torch.cat([torch.tensor([row for row, owner, _ in case.rows() if owner == s]) for s in order])
    shuffled = paged_case([query_lens[s] for s in order], [seq_lens[s] for s in order], seed=9)
    got, _ = mla_decode(q[rows], shuffled.cache([contents[s] for s in order]), shuffled.batch, 4, SCALE)
    assert torch.equal(got, out[rows])


def test_strided_queries() -> None:
    case = paged_case([2, 3], [10, 30])
    cache = case.cache(random_contents([10, 30], 6))
    q = torch.randn(5, 6, 14)[:, ::2, 4:10]
    expected, _ = mla_decode(q.contiguous(), cache, case.batch, 4, SCALE)
    assert torch.equal(mla_decode(q, cache, case.batch, 4, SCALE)[0], expected)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_narrow_cache_is_read_exactly(cache_dtype: torch.dtype) -> None:
    seq_lens, kv_scale = [40, 7], 0.5
    case = paged_case([2, 1], seq_lens)
    contents = [content.to(cache_dtype).float() * kv_scale for content in random_contents(seq_lens, 6)]
    cache = (case.cache(contents) / kv_scale).to(cache_dtype)
    q = torch.randn(3, 2, 6)
    expected, _ = mla_decode(q, case.cache(contents), case.batch, 4, SCALE)
    assert torch.equal(mla_decode(q, cache, case.batch, 4, SCALE, kv_scale)[0], expected)


def test_bf16_queries_are_multiplied_in_float32() -> None:
    case = paged_case([2], [40])
    cache = case.cache(random_contents([40], 6))
    q = torch.randn(2, 3, 6).bfloat16()
    expected, _ = mla_decode(q.float(), cache, case.batch, 4, SCALE)
    out, _ = mla_decode(q, cache, case.batch, 4, SCALE)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected.bfloat16())


def test_block_ids_beyond_16_bits() -> None:
    last = 70_000 - 1
    cache = torch.full((last + 1, 4, 6), torch.nan)
    cache[last], cache[last - 65_536] = torch.randn(4, 6), 0
    table = torch.tensor([[last]], dtype=torch.int32)
    batch = dataclasses.replace(paged_case([1], [4], 4).batch, block_table=table)
    near = dataclasses.replace(batch, block_table=torch.zeros_like(table))
    q = torch.randn(1, 2, 6)
    expected, _ = mla_decode(q, cache[last:], near, 4, SCALE)
    assert torch.equal(mla_decode(q, cache, batch, 4, SCALE)[0], expected)


def test_large_scores_do_not_overflow() -> None:
    case = paged_case([1], [40])
    contents = [random_contents([40], 6)[0] * 1e4]
    check(torch.randn(1, 2, 6) * 1e4, contents, case, 4)


def test_the_reference_needs_no_plan() -> None:
    assert plan_mla_decode(paged_case([1], [5]).batch, 8, 16, split_tokens=4) is None


CASE = paged_case([1, 2], [5, 20])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.randn(4, 2, 6)}, r"^q: got shape \[4, 2, 6\], expected \[3, any, 6\]"),
        ({"q": torch.randn(3, 2, 5)}, r"^q: got shape \[3, 2, 5\], expected \[3, any, 6\]"),
        ({"q": torch.ones(3, 2, 6, dtype=torch.int32)}, "^q: got torch.int32"),
        ({"latent_cache": torch.randn(80, 6)}, r"^latent_cache: got shape \[80, 6\]"),
        ({"kv_lora_rank": 7}, "^kv_lora_rank: got 7, expected 1 to 6"),
        (
            {"batch": dataclasses.replace(CASE.batch, cu_seqlens_q=torch.tensor([0, 1, 4], dtype=torch.int32))},
            r"^batch.cu_seqlens_q: got \[0, 1, 4\], expected to rise from 0 to at most 3",
        ),
        (
            {"batch": dataclasses.replace(CASE.batch, cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32))},
            r"^batch.cu_seqlens_q: got shape \[2\], expected \[3\]",
        ),
        (
            {"batch": dataclasses.replace(CASE.batch, block_table=CASE.batch.block_table[:, :1])},
            r"^batch.seq_lens\[1\]: got 20, expected 0 to 16, what 1 blocks of 16 hold",
        ),
        (
            {"batch": dataclasses.replace(CASE.batch, seq_lens=torch.tensor([5, -1], dtype=torch.int32))},
            r"^batch.seq_lens\[1\]: got -1",
        ),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, object], message: str) -> None:
    arguments = {
        "q": torch.randn(3, 2, 6),
        "latent_cache": CASE.cache(random_contents([5, 20], 6)),
        "batch": CASE.batch,
        "kv_lora_rank": 4,
        "softmax_scale": SCALE,
    }
    with pytest.raises(ValueError, match=message):
        mla_decode(**(arguments | change))
