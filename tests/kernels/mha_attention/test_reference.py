"""The reference of paged multi-head attention against naive float64: grouped heads, sliding windows, ragged batches."""

import pytest
import torch
from torch import Tensor

from kimi_kernels.mha_attention.reference import mha_attention, store_kv
from support.attention_cases import PagedCase, paged_case, random_contents

SCALE = 0.3
TOLERANCE = 2e-5


def kv_cache_of(case: PagedCase, contents: list[Tensor]) -> Tensor:
    """contents: [length, 2, num_kv_heads, head_dim] of each sequence."""
    return case.cache(contents).permute(2, 0, 1, 3, 4).contiguous()


def naive_mha(q: Tensor, contents: list[Tensor], case: PagedCase, window: int | None) -> Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // contents[0].shape[2]
    for row, sequence, stop in case.rows():
        keys_values = contents[sequence].double()
        visible = [j for j in range(stop) if window is None or j > stop - 1 - window]
        for head in range(q.shape[1] if stop else 0):
            keys, values = keys_values[visible, 0, head // group], keys_values[visible, 1, head // group]
            weights = (keys @ q[row, head].double() * SCALE).exp()
            out[row, head] = weights / weights.sum() @ values
    return out


@pytest.mark.parametrize("window", [None, 1, 5, 16, 17, 64, 1000])
@pytest.mark.parametrize("block_size", [8, 16, 64, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(1, 1, 1), (4, 2, 16), (6, 1, 5), (3, 3, 8)])
def test_a_ragged_batch_with_empty_sequences(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, window: int | None
) -> None:
    seq_lens = [1, 0, 65, 3, 63, block_size + 1, 150]
    case = paged_case([1, 2, 9, 3, 0, 8, 1], seq_lens, block_size, padding_rows=2)
    contents = random_contents(seq_lens, 2, num_kv_heads, head_dim)
    q = torch.randn(case.batch.num_tokens, num_heads, head_dim)
    out = mha_attention(q, kv_cache_of(case, contents), case.batch, SCALE, window)
    torch.testing.assert_close(out.double(), naive_mha(q, contents, case, window), rtol=TOLERANCE, atol=TOLERANCE)


def test_a_window_never_reads_what_lies_before_it() -> None:
    contents = random_contents([100], 2, 2, 4)
    contents[0][:68] = torch.nan
    case = paged_case([3], [100])
    q = torch.randn(3, 4, 4)
    out = mha_attention(q, kv_cache_of(case, contents), case.batch, SCALE, 30)
    torch.testing.assert_close(out.double(), naive_mha(q, contents, case, 30), rtol=TOLERANCE, atol=TOLERANCE)


def test_strided_queries_and_bf16() -> None:
    case = paged_case([2, 3], [10, 30])
    cache = kv_cache_of(case, random_contents([10, 30], 2, 2, 6)).bfloat16()
    q = torch.randn(5, 8, 14)[:, ::2, 4:10].bfloat16()
    out = mha_attention(q, cache, case.batch, SCALE, None)
    expected = mha_attention(q.contiguous().float(), cache.float(), case.batch, SCALE, None)
    assert torch.equal(out, expected.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_store_kv_writes_rows_at_their_slots_and_nothing_else(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = torch.randn(2, 4, 2, 20)
    k, v = wide[0, ..., 5:10], wide[1, ..., 5:10]
    cache = torch.zeros(2, 3, 16, 2, 5).to(dtype)
    store_kv(k, v, cache, torch.tensor([40, -1, 0, 17]))
    expected = torch.zeros(2, 48, 2, 5)
    for token, slot in ((0, 40), (2, 0), (3, 17)):
        expected[0, slot], expected[1, slot] = k[token], v[token]
    assert torch.equal(cache.float().flatten(1, 2), expected.to(dtype).float())


@pytest.mark.parametrize("window", [None, 10])
def test_a_float8_cache_holds_the_value_over_the_scale(window: int | None) -> None:
    case = paged_case([3, 1], [40, 7])
    q = torch.randn(case.batch.num_tokens, 4, 8)
    cache = kv_cache_of(case, random_contents([40, 7], 2, 2, 8)).nan_to_num(0).to(torch.float8_e4m3fn)
    got = mha_attention(q, cache, case.batch, SCALE, window, 0.5)
    assert torch.equal(got, mha_attention(q, cache.float() * 0.5, case.batch, SCALE, window))
    rows = torch.tensor([1.0, 300.0, -500.0, 0.3]).expand(1, 2, 4)
    stored = torch.zeros(2, 1, 16, 2, 4).to(torch.float8_e4m3fn)
    store_kv(rows, -rows, stored, torch.tensor([3]), 0.5)
    expected = torch.tensor([2.0, 448.0, -448.0, 0.6]).to(torch.float8_e4m3fn).float()
    assert torch.equal(stored.float()[0, 0, 3], expected.expand(2, 4))
    assert torch.equal(stored.float()[1, 0, 3], -expected.expand(2, 4))


def test_what_is_stored_is_attended_to() -> None:
    torch.manual_seed(0)
    case = paged_case([20], [20])
    contents = random_contents([20], 2, 2, 8)
    cache = torch.full((2, case.num_slots // 16, 16, 2, 8), torch.nan)
    store_kv(contents[0][:, 0], contents[0][:, 1], cache, case.slots[0])
    q = torch.randn(20, 4, 8)
    got = mha_attention(q, cache, case.batch, SCALE, None)
    assert torch.equal(got, mha_attention(q, kv_cache_of(case, contents), case.batch, SCALE, None))


BATCH = paged_case([1, 2], [5, 20]).batch
CACHE = torch.randn(2, 6, 16, 2, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: mha_attention(torch.randn(3, 5, 4), CACHE, BATCH, SCALE, None),
            "^q: got 5 heads, expected a multiple",
        ),
        (lambda: mha_attention(torch.randn(3, 4, 6), CACHE, BATCH, SCALE, None), r"^q: .*expected \[3, any, 4\]"),
        (lambda: mha_attention(torch.randn(3, 4, 4), CACHE[0], BATCH, SCALE, None), "^kv_cache: got shape"),
        (lambda: mha_attention(torch.randn(3, 4, 4), CACHE, BATCH, SCALE, 0), "^sliding_window: got 0"),
        (
            lambda: store_kv(torch.randn(3, 3, 4), torch.randn(3, 3, 4), CACHE, torch.arange(3)),
            r"^k: got shape \[3, 3, 4\], expected \[any, 2, 4\]",
        ),
        (lambda: store_kv(torch.randn(3, 2, 4), torch.randn(2, 2, 4), CACHE, torch.arange(3)), "^v: got shape"),
        (lambda: store_kv(torch.randn(3, 2, 4), torch.randn(3, 2, 4), CACHE, torch.arange(2)), "^slot_mapping: got"),
        (
            lambda: store_kv(torch.randn(3, 2, 4), torch.randn(3, 2, 4), CACHE.transpose(1, 2), torch.arange(3)),
            "^kv_cache: got strides",
        ),
    ],
)
def test_a_wrong_argument_is_named(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()
