"""Absorbed MLA attention, each implementation against its formula: NaN in unused slots, huge ids in unused entries."""

import dataclasses
import math
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_kernels import KernelSet
from kimi_kernels.attention_batch import AttentionBatch, DecodePlan
from kimi_kernels.kernel_interpreter import INTERPRETER_PROCESSORS
from kimi_kernels.mla_decode import kernel, kernel_values, naive, plain, plain_on_cuda
from kimi_kernels.mla_decode.geometry import TritonDecodePlan
from kimi_kernels.paged_rows import seeing_rows
from support.attention_cases import PagedCase, paged_case, random_contents, see_more_keys, with_a_key_to_spare
from support.attention_shards import Shard, merge_shards, shards_of
from support.bit_equality import assert_same_bits
from support.interpreted import INTERPRETED
from support.row_errors import worst_row_error

LORA_RANK, ROPE_DIM = 32, 16
SCALE = 0.17
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
"""norm(error) / norm(row). float16: weights and results rounded to 2^-11. bfloat16: the interpreter rounds it towards
zero."""

Ops = ModuleType | SimpleNamespace


def plan_products(batch: AttentionBatch, num_heads: int, block_size: int, split_tokens: int = 0) -> DecodePlan:
    """Plan what `plain.plan_mla_decode` plans on a GPU."""
    products = plain_on_cuda.products(batch, seeing_rows(batch, block_size), block_size)
    return plain.PlainDecodePlan(block_size=block_size, products=products)


ON_GPU = SimpleNamespace(plan_mla_decode=plan_products, mla_decode=plain.mla_decode)
PLAIN, BY_PRODUCTS = pytest.param(plain, id="plain"), pytest.param(ON_GPU, id="plain as on a GPU")
KERNEL = pytest.param(kernel, id="kernel", marks=INTERPRETED)
every_implementation = pytest.mark.parametrize("ops", [PLAIN, BY_PRODUCTS, KERNEL])
the_kernel = pytest.mark.parametrize("ops", [KERNEL])
plain_and_kernel = pytest.mark.parametrize("ops", [PLAIN, KERNEL])


@pytest.fixture(autouse=True)
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows have several numbers of keys, and several products of each, as on a GPU."""
    monkeypatch.setattr(plain_on_cuda, "KEYS", 32)
    monkeypatch.setattr(plain_on_cuda, "ROWS_TIMES_KEYS", 128)


def inputs(case: PagedCase, num_heads: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(case.batch.num_tokens, num_heads, LORA_RANK + ROPE_DIM, generator=generator).to(dtype)
    contents = random_contents([len(slots) for slots in case.slots], LORA_RANK + ROPE_DIM)
    return q, case.cache(contents).to(dtype)


def attend(ops: Ops, q: Tensor, cache: Tensor, batch: AttentionBatch, *, split_tokens: int = 0) -> Tensor:
    """Attend with a plan, as layers do."""
    plan = ops.plan_mla_decode(batch, q.shape[1], cache.shape[1], split_tokens)
    out, lse = ops.mla_decode(q, cache, dataclasses.replace(batch, decode_plan=plan), LORA_RANK, SCALE)
    assert lse is None
    return out


def check(
    ops: Ops, case: PagedCase, num_heads: int, dtype: torch.dtype = torch.float32, split_tokens: int = 0
) -> Tensor:
    q, cache = inputs(case, num_heads, dtype)
    plan = ops.plan_mla_decode(case.batch, num_heads, case.block_size, split_tokens)
    batch = dataclasses.replace(case.batch, decode_plan=plan)
    out, lse = ops.mla_decode(q, cache, batch, LORA_RANK, SCALE, return_lse=True)
    expected, expected_lse = naive.mla_decode(q, cache, case.batch, LORA_RANK, SCALE)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert worst_row_error(out, expected) < TOLERANCE[dtype]
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    return out


@every_implementation
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_a_ragged_batch_with_empty_sequences_and_padding(ops: Ops, block_size: int) -> None:
    check(ops, paged_case([4, 2, 0, 3, 2, 1], [200, 0, 64, 5, 129, 1], block_size, padding_rows=3), 8)


@every_implementation
@pytest.mark.parametrize("num_heads", [1, 3, 8, 16, 33, 64])
def test_heads_that_fill_and_overflow_a_tile(ops: Ops, num_heads: int) -> None:
    check(ops, paged_case([3, 1], [70, 130], 64), num_heads)


@every_implementation
@pytest.mark.parametrize("num_rows", [*range(1, 9), 65])
def test_rows_see_each_other_causally(ops: Ops, num_rows: int) -> None:
    check(ops, paged_case([num_rows, 1], [63 + num_rows, 9], 64), 4)


@pytest.mark.parametrize("ops", [PLAIN, BY_PRODUCTS])
@pytest.mark.parametrize(("num_heads", "kv_lora_rank", "rope_dim"), [(1, 4, 2), (1, 16, 16), (17, 7, 3), (4, 3, 1)])
def test_any_widths(ops: Ops, num_heads: int, kv_lora_rank: int, rope_dim: int) -> None:
    """The kernels take powers of two."""
    seq_lens = [1, 0, 65, 3, 63, 16, 17, 200]
    case = paged_case([1, 2, 4, 3, 0, 1, 8, 1], seq_lens, padding_rows=3)
    cache = case.cache(random_contents(seq_lens, kv_lora_rank + rope_dim))
    q = torch.randn(case.batch.num_tokens, num_heads, kv_lora_rank + rope_dim)
    batch = dataclasses.replace(case.batch, decode_plan=ops.plan_mla_decode(case.batch, num_heads, 16))
    found = ops.mla_decode(q, cache, batch, kv_lora_rank, SCALE, return_lse=True)
    expected = naive.mla_decode(q, cache, case.batch, kv_lora_rank, SCALE)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-5)


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types(ops: Ops, dtype: torch.dtype) -> None:
    check(ops, paged_case([4, 1], [150, 66], 64), 8, dtype)


@every_implementation
def test_float8_latents(ops: Ops) -> None:
    case = paged_case([4, 1, 1], [150, 66, 0], 64)
    q, cache = inputs(case, 8, torch.float16)
    narrow = (cache.float() / 0.25).to(torch.float8_e4m3fn)
    out, _ = ops.mla_decode(q, narrow, case.batch, LORA_RANK, SCALE, 0.25)
    expected, _ = naive.mla_decode(q, narrow, case.batch, LORA_RANK, SCALE, 0.25)
    assert worst_row_error(out, expected) < TOLERANCE[torch.float16]


@every_implementation
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_causal_bound_that_is_off_by_one_shows(ops: Ops, dtype: torch.dtype) -> None:
    """Planted fault."""
    case = with_a_key_to_spare(paged_case([4, 1], [151, 67], 64))
    out = check(ops, case, 8, dtype)
    q, cache = inputs(case, 8, dtype)
    for num_more_keys in (-1, 1):
        planted = attend(ops, q, cache, see_more_keys(case.batch, num_more_keys))
        assert worst_row_error(planted, out) > 4 * TOLERANCE[dtype]


@every_implementation
def test_rows_before_the_first_key_give_zero(ops: Ops) -> None:
    assert not check(ops, paged_case([5], [2], 16), 4)[:3].any()


@every_implementation
def test_no_rows_and_no_sequences(ops: Ops) -> None:
    for case in (paged_case([], []), paged_case([0], [16])):
        out = attend(ops, torch.randn(0, 4, LORA_RANK + ROPE_DIM), torch.randn(3, 16, LORA_RANK + ROPE_DIM), case.batch)
        assert out.shape == (0, 4, LORA_RANK)


@every_implementation
def test_strided_queries(ops: Ops) -> None:
    case = paged_case([2, 1], [70, 5], 64)
    q, cache = inputs(case, 4)
    wide = torch.full((q.shape[0], 6, q.shape[2] + 8), torch.nan)
    wide[:, 1:5, : q.shape[2]] = q
    out = attend(ops, wide[:, 1:5, : q.shape[2]], cache, case.batch)
    assert torch.equal(out, attend(ops, q, cache, case.batch))


@every_implementation
def test_a_permuted_batch_gives_permuted_rows(ops: Ops) -> None:
    case = paged_case([2, 2, 2], [200, 3, 64], 16)
    q, cache = inputs(case, 4)
    order = torch.tensor([2, 0, 1])
    moved = dataclasses.replace(
        case.batch, seq_lens=case.batch.seq_lens[order], block_table=case.batch.block_table[order]
    )
    permuted = attend(ops, q.view(3, 2, 4, -1)[order].flatten(0, 1), cache, moved)
    expected = attend(ops, q, cache, case.batch).view(3, 2, 4, -1)[order]
    torch.testing.assert_close(permuted.view(3, 2, 4, -1), expected, rtol=1e-5, atol=1e-6)


@every_implementation
def test_block_ids_beyond_16_bits(ops: Ops) -> None:
    last = 70_000 - 1
    cache = torch.full((last + 1, 16, LORA_RANK + ROPE_DIM), torch.nan, dtype=torch.float16)
    cache[last], cache[last - 65_536] = torch.randn(16, LORA_RANK + ROPE_DIM), 0
    near = dataclasses.replace(paged_case([1], [16]).batch, block_table=torch.tensor([[0]], dtype=torch.int32))
    far = dataclasses.replace(near, block_table=near.block_table + last)
    q = torch.randn(1, 2, LORA_RANK + ROPE_DIM).half()
    assert torch.equal(attend(ops, q, cache, far), attend(ops, q, cache[last:], near))


@every_implementation
def test_large_scores_do_not_overflow(ops: Ops) -> None:
    case = paged_case([1], [40])
    q, cache = inputs(case, 2)
    out, lse = ops.mla_decode(1e4 * q, 1e4 * cache, case.batch, LORA_RANK, SCALE, return_lse=True)
    expected, expected_lse = naive.mla_decode(1e4 * q, 1e4 * cache, case.batch, LORA_RANK, SCALE)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_as_on_a_gpu_a_row_has_the_same_bits_beside_other_rows() -> None:
    """The other forms: test_attention_row_invariance.py."""
    seq_lens = [40, 7, 90, 64]
    together = paged_case([1, 1, 1, 1], seq_lens)
    q, cache = inputs(together, 8)
    out = attend(ON_GPU, q, cache, together.batch)
    for row, length in enumerate(seq_lens):
        alone = paged_case([1], [length], seed=row)
        content = cache.flatten(0, 1)[together.slots[row]]
        got = attend(ON_GPU, q[row : row + 1], alone.cache([content]), alone.batch)
        assert_same_bits(got, out[row : row + 1], f"row {row}")


LENGTHS, ROWS = [0, 1, 3, *range(64, 72)], 4
"""Fewer keys than rows and none, then every alignment of the last rows to eight keys that are dealt out."""
DEALT = paged_case([ROWS] * len(LENGTHS), LENGTHS, 16, padding_rows=2)


def attend_shard(ops: Ops, q: Tensor, shard: Shard, split_tokens: int = 0) -> tuple[Tensor, Tensor]:
    plan = ops.plan_mla_decode(shard.case.batch, q.shape[1], 16, split_tokens)
    batch, cache = dataclasses.replace(shard.case.batch, decode_plan=plan), shard.case.cache(shard.contents)
    out, lse = ops.mla_decode(q, cache, batch, LORA_RANK, SCALE, return_lse=True, row_keys=shard.row_keys)
    is_seen = shard.row_keys > 0
    is_seen[-2:] = False
    assert torch.equal(lse.isfinite().all(-1), is_seen)
    assert (lse[~is_seen] == -torch.inf).all() and not out[~is_seen].any()
    return out, lse


def check_shards(ops: Ops, num_shards: int, run: int, dtype: torch.dtype, split_tokens: int = 0) -> None:
    q, cache = inputs(DEALT, 4, dtype)
    contents = [cache.flatten(0, 1)[slots] for slots in DEALT.slots]
    shards = shards_of(DEALT, contents, num_shards, run)
    assert any((shard.row_keys[: ROWS * len(LENGTHS)] == 0).any() for shard in shards)
    out, lse = merge_shards(*zip(*[attend_shard(ops, q, shard, split_tokens) for shard in shards], strict=True))
    expected, expected_lse = naive.mla_decode(q, cache, DEALT.batch, LORA_RANK, SCALE)
    assert worst_row_error(out, expected) < TOLERANCE[dtype]
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@plain_and_kernel
@pytest.mark.parametrize(("num_shards", "run"), [(2, 1), (4, 1), (8, 1), (2, 3), (2, 4)])
def test_attention_over_parts_of_the_keys_adds_up_to_the_whole(ops: Ops, num_shards: int, run: int) -> None:
    """run: keys dealt at a time."""
    check_shards(ops, num_shards, run, torch.float32)


@the_kernel
def test_parts_of_the_keys_in_fixed_splits_and_narrow_types_add_up(ops: Ops) -> None:
    check_shards(ops, 2, 1, torch.float16, 64)


@plain_and_kernel
def test_a_wrong_number_of_keys_shows(ops: Ops) -> None:
    """Planted fault."""
    q, cache = inputs(DEALT, 4)
    shard = shards_of(DEALT, [cache.flatten(0, 1)[slots] for slots in DEALT.slots], 2, 1)[0]
    fewer = dataclasses.replace(shard, row_keys=(shard.row_keys - 1).clamp(min=0))
    error = worst_row_error(attend_shard(ops, q, fewer)[0], attend_shard(ops, q, shard)[0])
    assert error > 4 * TOLERANCE[torch.float32]


@the_kernel
@pytest.mark.parametrize("split_tokens", [64, 128])
def test_fixed_splits(ops: Ops, split_tokens: int) -> None:
    check(ops, paged_case([4, 1, 2], [300, 0, 129], 64), 8, split_tokens=split_tokens)


@the_kernel
def test_fixed_splits_give_a_row_the_same_bits_in_any_batch(ops: Ops) -> None:
    one = paged_case([4], [300], 64)
    q, cache = inputs(one, 8)
    alone = attend(ops, q, cache, one.batch, split_tokens=64)
    case = paged_case([1, 4, 2], [500, 300, 70], 64)
    contents = [torch.zeros(500, 48), cache.flatten(0, 1)[one.slots[0]], torch.zeros(70, 48)]
    rows = torch.cat([torch.zeros(1, 8, 48), q, torch.zeros(2, 8, 48)])
    assert torch.equal(attend(ops, rows, case.cache(contents), case.batch, split_tokens=64)[1:5], alone)


@the_kernel
def test_an_earlier_row_has_the_same_bits_when_later_rows_open_another_split(ops: Ops) -> None:
    case = paged_case([4], [130], 64)
    q, cache = inputs(case, 8)
    short = dataclasses.replace(
        case.batch,
        seq_lens=torch.tensor([127], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        num_tokens=1,
        max_query_len=1,
    )
    with_later = attend(ops, q, cache, case.batch, split_tokens=64)
    assert torch.equal(with_later[:1], attend(ops, q[:1], cache, short, split_tokens=64))


@the_kernel
@pytest.mark.parametrize("at_once", [2, 4])
def test_more_pieces_than_are_merged_at_once(ops: Ops, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One long sequence is cut into as many pieces as there are processors, five here."""
    monkeypatch.setattr(kernel, "MOST_MERGED", at_once)
    check(ops, paged_case([1], [64 * INTERPRETER_PROCESSORS], 64), 8)
    check(ops, paged_case([2, 1], [700, 9], 64), 8)


@the_kernel
@pytest.mark.parametrize("split_tokens", [0, 64])
def test_a_plan_covers_every_key_once(ops: Ops, split_tokens: int) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(6):
        seq_lens = torch.randint(0, 900, (7,), generator=generator).tolist()
        query_lens = torch.randint(0, 5, (7,), generator=generator).tolist()
        case = paged_case(query_lens, seq_lens, 64)
        plan = ops.plan_mla_decode(case.batch, 16, 64, split_tokens)
        assert isinstance(plan, TritonDecodePlan)
        assert_covers(plan, case.batch)


@the_kernel
@pytest.mark.parametrize(
    ("seq_lens", "is_cut"),
    [([192] * 9, False), ([192] * 8 + [130], False), ([448] * 9, True), ([192] * 8 + [704], True)],
)
def test_sequences_of_one_length_stay_whole(ops: Ops, seq_lens: list[int], is_cut: bool) -> None:
    """Nine for five teams: two whole ones each are a tile more than the share with three tiles, two with seven."""
    case = paged_case([2] * 9, seq_lens, 64)
    plan = ops.plan_mla_decode(case.batch, 8, 64, 0)
    assert isinstance(plan, TritonDecodePlan)
    assert_covers(plan, case.batch)
    _, entries = plan.tensors
    assert (max(entries[1 : 1 + entries[0, 0], 4].tolist()) > 1) == is_cut
    check(ops, case, 8)


def assert_covers(plan: TritonDecodePlan, batch: AttentionBatch) -> None:
    records, _ = plan.tensors
    geometry = plan.geometry
    covered: dict[tuple[int, int], list[int]] = {}
    for team in range(geometry.num_teams):
        count, first_item = records[team, 8].item(), records[team, 9].item()
        for segment in range(count):
            record = records[team if segment == 0 else geometry.num_teams + first_item + segment].tolist()
            covered.setdefault((record[0], record[3]), []).extend(range(record[4], record[5]))
    lengths, starts = batch.seq_lens.tolist(), batch.cu_seqlens_q.tolist()
    for sequence, length in enumerate(lengths):
        num_rows = (starts[sequence + 1] - starts[sequence]) * geometry.num_heads
        tiles = range(0, -(-num_rows // geometry.tile_rows), geometry.team_size)
        for tile in tiles:
            assert sorted(covered.pop((sequence, tile))) == list(range(-(-length // geometry.tile_keys)))
    assert not covered


@the_kernel
@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "padding", "split_tokens", "is_fused", "dtype"),
    [
        ([1], [1300], 0, 0, True, torch.float32),
        ([4, 0, 2, 1], [300, 64, 0, 65], 1, 0, True, torch.float16),
        ([1] * 9, [65] * 9, 0, 0, False, torch.float32),
        ([2, 1], [100, 70], 0, 64, False, torch.float16),
        ([0], [64], 0, 0, False, torch.float32),
    ],
    ids=["pieces read twice", "ragged with padding", "many programs", "fixed splits", "no rows"],
)
def test_merging_and_w_uv_in_one_launch(
    ops: Ops,
    query_lens: list[int],
    seq_lens: list[int],
    padding: int,
    split_tokens: int,
    is_fused: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = paged_case(query_lens, seq_lens, 64, padding_rows=padding)
    q, cache = inputs(case, 8, dtype)
    w_uv = (torch.randn(8, LORA_RANK, 40) / LORA_RANK**0.5).to(dtype)
    monkeypatch.setattr(kernel, "num_processors", lambda device: 18)
    launched = []
    merge = kernel_values._merge_values
    monkeypatch.setattr(kernel_values, "_merge_values", lambda *given: launched.append(1) or merge(*given))
    batch = dataclasses.replace(case.batch, decode_plan=ops.plan_mla_decode(case.batch, 8, 64, split_tokens))
    found = kernel_values.mla_values(q, cache, batch, w_uv, SCALE)
    assert bool(launched) == is_fused and found.dtype == dtype
    latents, _ = naive.mla_decode(q, cache, case.batch, LORA_RANK, SCALE)
    expected = torch.einsum("tnl,nlv->tnv", latents, w_uv.double())
    assert worst_row_error(found, expected) < (2e-6 if dtype == torch.float32 else 2e-3)


def test_plain_values_are_the_two_ops() -> None:
    case = paged_case([4, 0, 2, 1], [300, 64, 0, 65], 64, padding_rows=1)
    q, cache = inputs(case, 8)
    w_uv = torch.randn(8, LORA_RANK, 40)
    latents, _ = naive.mla_decode(q, cache, case.batch, LORA_RANK, SCALE)
    found = KernelSet.plain().mla_values(q, cache, case.batch, w_uv, SCALE)
    assert worst_row_error(found, torch.einsum("tnl,nlv->tnv", latents, w_uv.double())) < TOLERANCE[torch.float32]


CASE = paged_case([1, 2], [5, 20], 16)
Q, CACHE = inputs(CASE, 4)


def with_batch(**changes: Any) -> dict[str, AttentionBatch]:
    return {"batch": dataclasses.replace(CASE.batch, **changes)}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.randn(4, 4, 48)}, r"^q: got shape \[4, 4, 48\], expected \[3, any, 48\]"),
    ({"q": torch.randn(3, 4, 47)}, r"^q: got shape \[3, 4, 47\], expected \[3, any, 48\]"),
    ({"q": torch.ones(3, 4, 48, dtype=torch.int32)}, "^q: got torch.int32"),
    ({"q": torch.randn(3, 4, 96)[..., ::2]}, "^q: got column stride 2"),
    ({"latent_cache": torch.randn(80, 48)}, r"^latent_cache: got shape \[80, 48\]"),
    ({"latent_cache": torch.randn(16, 6, 48).transpose(0, 1)}, "^latent_cache: got strides"),
    ({"kv_lora_rank": 49}, "^kv_lora_rank: got 49, expected 1 to 48"),
    ({"softmax_scale": -1.0}, "^softmax_scale: got -1.0"),
    ({"softmax_scale": math.nan}, "^softmax_scale: got nan"),
    ({"kv_scale": 0.0}, "^kv_scale: got 0.0"),
    ({"row_keys": torch.tensor([4], dtype=torch.int32)}, r"^row_keys: got shape \[1\], expected \[3\]"),
    ({"row_keys": torch.tensor([4, 5, 6])}, "^row_keys: got torch.int64"),
    (with_batch(block_table=CASE.batch.block_table.long()), "^batch.block_table: got torch.int64"),
    (with_batch(block_table=CASE.batch.block_table[:1]), r"^batch.block_table: got shape"),
    (with_batch(block_table=CASE.batch.block_table[:, ::2]), "^batch.block_table: got column stride 2"),
    (with_batch(decode_plan=DecodePlan()), r"^batch.decode_plan: got a DecodePlan"),
]
WRONG_FOR_PLAIN: list[tuple[dict[str, Any], str]] = [
    (with_batch(cu_seqlens_q=torch.tensor([0, 1, 4], dtype=torch.int32)), r"^batch.cu_seqlens_q: got \[0, 1, 4\]"),
    (with_batch(cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32)), r"^batch.cu_seqlens_q: got shape \[2\]"),
    (
        with_batch(block_table=CASE.batch.block_table[:, :1].contiguous()),
        r"^batch.seq_lens\[1\]: got 20, expected 0 to 16, what 1 blocks of 16 hold",
    ),
    (with_batch(seq_lens=torch.tensor([5, -1], dtype=torch.int32)), r"^batch.seq_lens\[1\]: got -1"),
    ({"row_keys": torch.tensor([1, 5, 4], dtype=torch.int32)}, r"^row_keys of sequence 1: got \[5, 4\], .* rise from"),
    ({"row_keys": torch.tensor([1, 5, 21], dtype=torch.int32)}, r"^row_keys of sequence 1: got \[5, 21\], .* most 20"),
    ({"row_keys": torch.tensor([-1, 4, 5], dtype=torch.int32)}, r"^row_keys of sequence 0: got \[-1\]"),
    (with_batch(decode_plan=plain.plan_mla_decode(CASE.batch, 4, 32)), r"^batch.decode_plan: .* blocks of 16"),
]
WRONG_FOR_THE_KERNEL: list[tuple[dict[str, Any], str]] = [
    ({"latent_cache": CACHE.half()}, "^latent_cache: got torch.float16"),
    ({"kv_lora_rank": 24}, "^kv_lora_rank: got width 24"),
]


@pytest.mark.parametrize(
    ("ops", "change", "message"),
    [
        *((plain, *wrong) for wrong in [*WRONG, *WRONG_FOR_PLAIN]),
        *(pytest.param(kernel, *wrong, marks=INTERPRETED) for wrong in [*WRONG, *WRONG_FOR_THE_KERNEL]),
    ],
)
def test_a_wrong_argument_is_named(ops: Ops, change: dict[str, Any], message: str) -> None:
    given = {"q": Q, "latent_cache": CACHE, "batch": CASE.batch, "kv_lora_rank": LORA_RANK, "softmax_scale": SCALE}
    with pytest.raises(ValueError, match=message):
        ops.mla_decode(**(given | change))


@the_kernel
def test_a_plan_for_other_heads_is_named(ops: Ops) -> None:
    batch = with_batch(decode_plan=ops.plan_mla_decode(CASE.batch, 8, 16))["batch"]
    with pytest.raises(ValueError, match=r"^batch.decode_plan: got for 8 heads"):
        ops.mla_decode(Q, CACHE, batch, kv_lora_rank=LORA_RANK, softmax_scale=SCALE)


@the_kernel
def test_a_length_of_splits_that_no_tile_has_is_named(ops: Ops) -> None:
    with pytest.raises(ValueError, match="split_tokens is 48"):
        ops.plan_mla_decode(CASE.batch, 4, 16, 48)
