"""Paged multi-head attention in Triton-language's interpreter against the reference."""

import dataclasses

import pytest
import torch
from torch import Tensor

from kimi_kernels.mha_attention import kernel, reference
from support.attention_cases import PagedCase, paged_case, random_contents, see_more_keys, with_a_key_to_spare
from support.interpreted import INTERPRETED
from support.row_errors import worst_row_error

pytestmark = INTERPRETED
HEAD_DIM = 16
SCALE = 0.3
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
"""norm(error) / norm(row). float16: weights and results rounded to 2^-11. bfloat16: the interpreter rounds it towards
zero."""


def inputs(case: PagedCase, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    contents = random_contents([len(slots) for slots in case.slots], 2, num_kv_heads, HEAD_DIM)
    planes = [case.cache([content[:, plane] for content in contents]) for plane in range(2)]
    q = torch.randn(case.batch.num_tokens, num_heads, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    return q.to(dtype), torch.stack(planes).to(dtype)


def check(
    case: PagedCase, num_heads: int, num_kv_heads: int, window: int | None = None, dtype: torch.dtype = torch.float32
) -> None:
    q, cache = inputs(case, num_heads, num_kv_heads, dtype)
    out = kernel.mha_attention(q, cache, case.batch, SCALE, window)
    expected = reference.mha_attention(q, cache, case.batch, SCALE, window)
    assert out.dtype == dtype
    assert worst_row_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (6, 2), (40, 2)])
def test_groups_of_query_heads(num_heads: int, num_kv_heads: int) -> None:
    check(paged_case([1, 3, 0, 2], [70, 3, 5, 0], 16, padding_rows=2), num_heads, num_kv_heads)


@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("window", [1, 7, 64, 1000])
def test_sliding_windows(block_size: int, window: int) -> None:
    check(paged_case([4, 1], [150, 65], block_size), 2, 1, window)


def test_many_new_rows() -> None:
    check(paged_case([150, 3], [160, 3], 16), 2, 1)


def test_long_sequences_are_split_and_merged() -> None:
    case = paged_case([2, 1], [700, 1], 64, padding_rows=1)
    check(case, 1, 1)
    assert kernel._num_splits(2, case.batch.max_seq_len, None, torch.device("cpu")) > 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types(dtype: torch.dtype) -> None:
    check(paged_case([4, 1], [150, 66], 64), 4, 2, None, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("num_more_keys", [-1, 1])
def test_a_causal_bound_that_is_off_by_one_shows(dtype: torch.dtype, window: int | None, num_more_keys: int) -> None:
    """Planted fault."""
    case = with_a_key_to_spare(paged_case([4, 1], [151, 67], 64))
    check(case, 4, 2, window, dtype)
    q, cache = inputs(case, 4, 2, dtype)
    right = kernel.mha_attention(q, cache, case.batch, SCALE, window)
    planted = kernel.mha_attention(q, cache, see_more_keys(case.batch, num_more_keys), SCALE, window)
    assert worst_row_error(planted, right) > 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_more_keys", [-1, 1])
def test_a_window_that_is_off_by_one_shows(dtype: torch.dtype, num_more_keys: int) -> None:
    """Planted fault."""
    case = paged_case([4, 1], [150, 66], 64)
    q, cache = inputs(case, 4, 2, dtype)
    right, planted = (kernel.mha_attention(q, cache, case.batch, SCALE, 20 + more) for more in (0, num_more_keys))
    assert worst_row_error(planted, right) > 4 * TOLERANCE[dtype]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "window"), [(4, 4, None), (6, 2, 20)])
def test_a_float8_cache_with_a_scale(num_heads: int, num_kv_heads: int, window: int | None) -> None:
    """Short sequences, and long ones that are split and merged; a scale that is forgotten on either side shows."""
    for case in (paged_case([4, 1, 0], [150, 66, 3], 64, padding_rows=1), paged_case([2, 1], [700, 1], 64)):
        q, cache = inputs(case, num_heads, num_kv_heads, torch.float32)
        narrow = (cache / 0.25).to(torch.float8_e4m3fn)
        out = kernel.mha_attention(q, narrow, case.batch, SCALE, window, 0.25)
        assert worst_row_error(out, reference.mha_attention(q, narrow, case.batch, SCALE, window, 0.25)) < 5e-6
        assert worst_row_error(out, reference.mha_attention(q, cache, case.batch, SCALE, window)) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_past_the_range_of_a_float8_cache_become_its_largest(dtype: torch.dtype) -> None:
    # Values that need no rounding: the interpreter drops the carry of one that rounds up to a power of two.
    held = 0.25 * torch.randn(2, 5, 3, 24).to(torch.float8_e4m3fn).float()
    k, v = held.masked_fill(held.abs() > 0.4, 1e4).copysign(held).to(dtype).unbind()
    slots = torch.tensor([40, -1, 0, 17, 5])
    out, expected = torch.full((2, 2, 3, 16, 3, 24), 7.0).to(torch.float8_e4m3fn).unbind()
    kernel.store_kv(k, v, out, slots, 0.25)
    reference.store_kv(k, v, expected, slots, 0.25)
    assert torch.equal(out.float(), expected.float())
    assert out.float().abs().max() == 448


def test_store_kv_writes_its_slots_and_nothing_else() -> None:
    k, v = torch.randn(4, 3, 24), torch.randn(4, 5, 24)[:, 1:4]
    slots = torch.tensor([40, -1, 0, 17])
    out, expected = torch.full((2, 3, 16, 3, 24), 7.0), torch.full((2, 3, 16, 3, 24), 7.0)
    kernel.store_kv(k, v, out, slots)
    reference.store_kv(k, v, expected, slots)
    assert torch.equal(out, expected)


def test_wrong_arguments_are_named() -> None:
    case = paged_case([1], [5], 16)
    q, cache = inputs(case, 4, 2, torch.float32)
    for call, message in (
        (lambda: kernel.mha_attention(q[:, :3], cache, case.batch, SCALE, None), "q: got 3 heads"),
        (lambda: kernel.mha_attention(q, cache, case.batch, SCALE, 0), "sliding_window"),
        (lambda: kernel.mha_attention(q, cache.half(), case.batch, SCALE, None), "kv_cache"),
        (lambda: kernel.mha_attention(q, cache, case.batch, SCALE, None, 0.5), "kv_scale: got 0.5"),
        (lambda: kernel.store_kv(q[:, :2], q[:, :2], cache, case.slots[0][:1], 0.5), "kv_scale: got 0.5"),
        (
            lambda: kernel.mha_attention(q, cache, dataclasses.replace(case.batch, num_tokens=2), SCALE, None),
            "q: got shape",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
