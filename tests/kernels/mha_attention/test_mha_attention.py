"""Paged multi-head attention and its cache's write, each implementation against its words: grouped heads, sliding
windows, ragged batches, NaN in unused slots."""

import dataclasses
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_kernels.mha_attention import kernel, naive, plain
from support.attention_cases import PagedCase, paged_case, random_contents, see_more_keys, with_a_key_to_spare
from support.implementations import implementations
from support.interpreted import INTERPRETED
from support.row_errors import worst_row_error

SCALE = 0.3
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
"""norm(error) / norm(row). float16: weights and results rounded to 2^-11. bfloat16: the interpreter rounds it towards
zero."""
every_implementation = implementations("mha_attention")


def inputs(
    case: PagedCase, num_heads: int, num_kv_heads: int, dtype: torch.dtype = torch.float32, head_dim: int = 16
) -> tuple[Tensor, Tensor]:
    contents = random_contents([len(slots) for slots in case.slots], 2, num_kv_heads, head_dim)
    q = torch.randn(case.batch.num_tokens, num_heads, head_dim, generator=torch.Generator().manual_seed(1))
    return q.to(dtype), case.cache(contents).permute(2, 0, 1, 3, 4).contiguous().to(dtype)


def check(
    ops: ModuleType,
    case: PagedCase,
    num_heads: int,
    num_kv_heads: int,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 16,
) -> None:
    q, cache = inputs(case, num_heads, num_kv_heads, dtype, head_dim)
    out = ops.mha_attention(q, cache, case.batch, SCALE, window)
    assert out.dtype == dtype
    assert worst_row_error(out, naive.mha_attention(q, cache, case.batch, SCALE, window)) < TOLERANCE[dtype]


@every_implementation
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (6, 2), (40, 2)])
def test_groups_of_query_heads(ops: ModuleType, num_heads: int, num_kv_heads: int) -> None:
    check(ops, paged_case([1, 3, 0, 2], [70, 3, 5, 0], 16, padding_rows=2), num_heads, num_kv_heads)


@every_implementation
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("window", [1, 7, 64, 1000])
def test_sliding_windows(ops: ModuleType, block_size: int, window: int) -> None:
    check(ops, paged_case([4, 1], [150, 65], block_size), 2, 1, window)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 17, 64, 1000])
@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(1, 1, 1), (4, 2, 16), (6, 1, 5), (3, 3, 8)])
def test_any_widths(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, window: int | None) -> None:
    """The kernel takes powers of two from 16 up."""
    seq_lens = [1, 0, 65, 3, 63, block_size + 1, 150]
    case = paged_case([1, 2, 9, 3, 0, 8, 1], seq_lens, block_size, padding_rows=2)
    check(plain, case, num_heads, num_kv_heads, window, head_dim=head_dim)


@every_implementation
def test_many_new_rows(ops: ModuleType) -> None:
    check(ops, paged_case([150, 3], [160, 3], 16), 2, 1)


@every_implementation
def test_long_sequences_are_split_and_merged(ops: ModuleType) -> None:
    case = paged_case([2, 1], [700, 1], 64, padding_rows=1)
    check(ops, case, 1, 1)
    assert kernel._num_splits(2, case.batch.max_seq_len, None, torch.device("cpu")) > 1


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types(ops: ModuleType, dtype: torch.dtype) -> None:
    check(ops, paged_case([4, 1], [150, 66], 64), 4, 2, None, dtype)


@every_implementation
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("num_more_keys", [-1, 1])
def test_a_bound_that_is_off_by_one_shows(ops: ModuleType, window: int | None, num_more_keys: int) -> None:
    """Planted faults: the causal bound, and the window's."""
    case = with_a_key_to_spare(paged_case([4, 1], [151, 67], 64))
    for dtype, tolerance in TOLERANCE.items():
        check(ops, case, 4, 2, window, dtype)
        q, cache = inputs(case, 4, 2, dtype)
        right = ops.mha_attention(q, cache, case.batch, SCALE, window)
        planted = [ops.mha_attention(q, cache, see_more_keys(case.batch, num_more_keys), SCALE, window)]
        if window is not None:
            planted.append(ops.mha_attention(q, cache, case.batch, SCALE, window + num_more_keys))
        assert min(worst_row_error(out, right) for out in planted) > 4 * tolerance


@every_implementation
def test_a_window_never_reads_what_lies_before_it(ops: ModuleType) -> None:
    case = paged_case([3], [100], 16)
    q, cache = inputs(case, 4, 2)
    poisoned = cache.flatten(1, 2)
    poisoned[:, case.slots[0][:64]] = torch.nan  # whole tiles of the kernel, which multiplies them by 0
    out = ops.mha_attention(q, cache, case.batch, SCALE, 30)
    assert worst_row_error(out, naive.mha_attention(q, cache, case.batch, SCALE, 30)) < TOLERANCE[torch.float32]


@every_implementation
def test_strided_queries(ops: ModuleType) -> None:
    case = paged_case([2, 3], [10, 30], 16)
    q, cache = inputs(case, 4, 2)
    wide = torch.full((5, 8, 40), torch.nan)
    wide[:, ::2, 4:20] = q
    out = ops.mha_attention(wide[:, ::2, 4:20], cache, case.batch, SCALE, None)
    assert torch.equal(out, ops.mha_attention(q, cache, case.batch, SCALE, None))


@every_implementation
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "window"), [(4, 4, None), (6, 2, 20)])
def test_a_float8_cache_with_a_scale(ops: ModuleType, num_heads: int, num_kv_heads: int, window: int | None) -> None:
    """Short sequences, and long ones that are split and merged; a scale that is forgotten on either side shows."""
    for case in (paged_case([4, 1, 0], [150, 66, 3], 64, padding_rows=1), paged_case([2, 1], [700, 1], 64)):
        q, cache = inputs(case, num_heads, num_kv_heads)
        narrow = (cache / 0.25).to(torch.float8_e4m3fn)
        out = ops.mha_attention(q, narrow, case.batch, SCALE, window, 0.25)
        assert worst_row_error(out, naive.mha_attention(q, narrow, case.batch, SCALE, window, 0.25)) < 5e-6
        assert worst_row_error(out, naive.mha_attention(q, cache, case.batch, SCALE, window)) < 0.1


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_past_the_range_of_a_float8_cache_become_its_largest(ops: ModuleType, dtype: torch.dtype) -> None:
    # Values that need no rounding: the interpreter drops the carry of one that rounds up to a power of two.
    held = 0.25 * torch.randn(2, 5, 3, 24).to(torch.float8_e4m3fn).float()
    k, v = held.masked_fill(held.abs() > 0.4, 1e4).copysign(held).to(dtype).unbind()
    slots = torch.tensor([40, -1, 0, 17, 5])
    out, expected = torch.full((2, 2, 3, 16, 3, 24), 7.0).to(torch.float8_e4m3fn).unbind()
    for one, cache in ((ops, out), (naive, expected)):
        one.store_kv(k, v, cache, slots, 0.25)
    assert torch.equal(out.float(), expected.float())
    assert out.float().abs().max() == 448


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store_kv_writes_its_slots_and_nothing_else(ops: ModuleType, dtype: torch.dtype) -> None:
    k, v = torch.randn(4, 3, 24).to(dtype), torch.randn(4, 5, 34).to(dtype)[:, 1:4, 5:29]
    slots = torch.tensor([40, -1, 0, 17])
    out, expected = torch.full((2, 2, 3, 16, 3, 24), 7.0).to(dtype).unbind()
    for one, cache in ((ops, out), (naive, expected)):
        one.store_kv(k, v, cache, slots)
    assert torch.equal(out, expected)


CASE = paged_case([1, 2], [5, 20], 16)
Q, CACHE = inputs(CASE, 4, 2)
ROWS, SLOTS = torch.randn(3, 2, 16), torch.arange(3)
ATTEND: dict[str, Any] = {
    "q": Q, "kv_cache": CACHE, "batch": CASE.batch, "softmax_scale": SCALE, "sliding_window": None,
}  # fmt: skip
STORE: dict[str, Any] = {"k": ROWS, "v": ROWS, "kv_cache": CACHE, "slot_mapping": SLOTS}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("mha_attention", {"q": Q[:, :3]}, "^q: got 3 heads, expected a multiple of kv_cache's 2"),
    ("mha_attention", {"q": torch.randn(3, 4, 6)}, r"^q: .*expected \[3, any, 16\]"),
    ("mha_attention", {"q": Q[:2]}, r"^q: got shape \[2, 4, 16\]"),
    ("mha_attention", {"q": Q.int()}, "^q: got torch.int32"),
    ("mha_attention", {"q": torch.randn(3, 4, 32)[..., ::2]}, "^q: got column stride 2"),
    ("mha_attention", {"kv_cache": CACHE[0]}, "^kv_cache: got shape"),
    ("mha_attention", {"sliding_window": 0}, "^sliding_window: got 0"),
    ("mha_attention", {"softmax_scale": 0.0}, "^softmax_scale: got 0.0"),
    ("mha_attention", {"kv_scale": 0.5}, "^kv_scale: got 0.5, expected 1, or of a float8 cache above 0"),
    (
        "mha_attention",
        {"batch": dataclasses.replace(CASE.batch, block_table=CASE.batch.block_table.long())},
        "^batch.block_table: got torch.int64",
    ),
    ("store_kv", {"k": torch.randn(3, 3, 16)}, r"^k: got shape \[3, 3, 16\], expected \[3, 2, 16\]"),
    ("store_kv", {"v": ROWS[:2]}, r"^v: got shape \[2, 2, 16\]"),
    ("store_kv", {"v": ROWS.int()}, "^v: got torch.int32"),
    ("store_kv", {"slot_mapping": SLOTS[:2]}, r"^slot_mapping: got shape \[2\]"),
    ("store_kv", {"slot_mapping": SLOTS.int()}, "^slot_mapping: got torch.int32"),
    ("store_kv", {"kv_cache": CACHE.transpose(1, 2)}, "^kv_cache: got"),
    ("store_kv", {"kv_cache": CACHE.transpose(1, 2).contiguous().transpose(1, 2)}, "^kv_cache: got strides"),
    ("store_kv", {"kv_scale": 0.5}, "^kv_scale: got 0.5"),
]
WRONG_FOR_THE_KERNEL: list[tuple[str, dict[str, Any], str]] = [
    ("mha_attention", {"kv_cache": CACHE.half()}, "^kv_cache: got torch.float16"),
    ("store_kv", {"k": ROWS.half()}, "^k: got torch.float16"),
]


@pytest.mark.parametrize(
    ("ops", "op", "change", "message"),
    [
        *((plain, *wrong) for wrong in WRONG),
        *(pytest.param(kernel, *wrong, marks=INTERPRETED) for wrong in [*WRONG, *WRONG_FOR_THE_KERNEL]),
    ],
)
def test_a_wrong_argument_is_named(ops: ModuleType, op: str, change: dict[str, Any], message: str) -> None:
    given = ATTEND if op == "mha_attention" else STORE
    with pytest.raises(ValueError, match=message):
        getattr(ops, op)(**(given | change))
