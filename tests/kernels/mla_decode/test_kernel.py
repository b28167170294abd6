"""`mla_decode` in Triton-language's interpreter against the reference."""

import dataclasses

import pytest
import torch
from torch import Tensor

from kimi_kernels.attention_batch import AttentionBatch, DecodePlan
from kimi_kernels.mla_decode import kernel, reference
from kimi_kernels.mla_decode.geometry import TritonDecodePlan
from kimi_kernels.mla_decode.kernel import mla_decode, plan_mla_decode
from support.attention_cases import PagedCase, paged_case, random_contents, see_more_keys, with_a_key_to_spare
from support.interpreted import INTERPRETED
from support.row_errors import worst_row_error

pytestmark = INTERPRETED
LORA_RANK, ROPE_DIM = 32, 16
SCALE = 0.17
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
"""norm(error) / norm(row). float16: weights and results rounded to 2^-11. bfloat16: the interpreter rounds it towards
zero."""


def inputs(case: PagedCase, num_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(case.batch.num_tokens, num_heads, LORA_RANK + ROPE_DIM, generator=generator).to(dtype)
    contents = random_contents([len(slots) for slots in case.slots], LORA_RANK + ROPE_DIM)
    return q, case.cache(contents).to(dtype)


def check(
    case: PagedCase, num_heads: int, dtype: torch.dtype = torch.float32, split_tokens: int = 0
) -> tuple[Tensor, Tensor]:
    q, cache = inputs(case, num_heads, dtype)
    batch = dataclasses.replace(
        case.batch, decode_plan=plan_mla_decode(case.batch, num_heads, case.block_size, split_tokens)
    )
    out, lse = mla_decode(q, cache, batch, LORA_RANK, SCALE, return_lse=True)
    expected, expected_lse = reference.mla_decode(q, cache, case.batch, LORA_RANK, SCALE, return_lse=True)
    assert lse is not None and expected_lse is not None
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert worst_row_error(out, expected) < TOLERANCE[dtype]
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    return out, lse


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_a_ragged_batch_with_empty_sequences_and_padding(block_size: int) -> None:
    seq_lens = [200, 0, 64, 5, 129, 1]
    check(paged_case([4, 2, 0, 3, 2, 1], seq_lens, block_size, padding_rows=3), 8)


@pytest.mark.parametrize("num_heads", [1, 3, 8, 16, 33, 64])
def test_heads_that_fill_and_overflow_a_tile(num_heads: int) -> None:
    check(paged_case([3, 1], [70, 130], 64), num_heads)


@pytest.mark.parametrize("num_rows", range(1, 9))
def test_up_to_eight_rows_see_each_other_causally(num_rows: int) -> None:
    check(paged_case([num_rows, 1], [63 + num_rows, 9], 64), 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types(dtype: torch.dtype) -> None:
    check(paged_case([4, 1], [150, 66], 64), 8, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_causal_bound_that_is_off_by_one_shows(dtype: torch.dtype) -> None:
    """Planted fault."""
    case = with_a_key_to_spare(paged_case([4, 1], [151, 67], 64))
    out, _ = check(case, 8, dtype)
    q, cache = inputs(case, 8, dtype)
    for num_more_keys in (-1, 1):
        planted, _ = mla_decode(q, cache, see_more_keys(case.batch, num_more_keys), LORA_RANK, SCALE)
        assert worst_row_error(planted, out) > 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("split_tokens", [64, 128])
def test_fixed_splits(split_tokens: int) -> None:
    check(paged_case([4, 1, 2], [300, 0, 129], 64), 8, split_tokens=split_tokens)


def test_fixed_splits_give_a_row_the_same_bits_in_any_batch() -> None:
    alone, _ = check(paged_case([4], [300], 64), 8, split_tokens=64)
    q, cache = inputs(paged_case([4], [300], 64), 8, torch.float32)
    case = paged_case([1, 4, 2], [500, 300, 70], 64)
    contents = [torch.zeros(500, 48), cache_rows(paged_case([4], [300], 64), cache), torch.zeros(70, 48)]
    rows = torch.cat([torch.zeros(1, 8, 48), q, torch.zeros(2, 8, 48)])
    batch = dataclasses.replace(case.batch, decode_plan=plan_mla_decode(case.batch, 8, 64, 64))
    beside, _ = mla_decode(rows, case.cache(contents), batch, LORA_RANK, SCALE)
    assert torch.equal(beside[1:5], alone)


def cache_rows(case: PagedCase, cache: Tensor) -> Tensor:
    return cache.view(-1, cache.shape[-1])[case.slots[0]]


def test_an_earlier_row_has_the_same_bits_when_later_rows_open_another_split() -> None:
    long_case = paged_case([4], [130], 64)
    q, cache = inputs(long_case, 8, torch.float32)
    plan = plan_mla_decode(long_case.batch, 8, 64, 64)
    with_later, _ = mla_decode(q, cache, dataclasses.replace(long_case.batch, decode_plan=plan), LORA_RANK, SCALE)
    short = dataclasses.replace(
        long_case.batch,
        seq_lens=torch.tensor([127], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        num_tokens=1,
        max_query_len=1,
    )
    short = dataclasses.replace(short, decode_plan=plan_mla_decode(short, 8, 64, 64))
    alone, _ = mla_decode(q[:1], cache, short, LORA_RANK, SCALE)
    assert torch.equal(with_later[:1], alone)


@pytest.mark.parametrize("at_once", [2, 4])
def test_more_pieces_than_are_merged_at_once(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One long sequence is cut into as many pieces as there are processors, five here."""
    monkeypatch.setattr(kernel, "MOST_MERGED", at_once)
    check(paged_case([1], [64 * kernel.INTERPRETER_PROCESSORS], 64), 8)
    check(paged_case([2, 1], [700, 9], 64), 8)


def test_float8_latents() -> None:
    case = paged_case([4, 1, 1], [150, 66, 0], 64)
    q, cache = inputs(case, 8, torch.float16)
    kv_scale = 0.25
    narrow = (cache.float() / kv_scale).to(torch.float8_e4m3fn)
    out, _ = mla_decode(q, narrow, case.batch, LORA_RANK, SCALE, kv_scale)
    expected, _ = reference.mla_decode(q, narrow, case.batch, LORA_RANK, SCALE, kv_scale)
    assert worst_row_error(out, expected) < TOLERANCE[torch.float16]


def test_a_permuted_batch_gives_permuted_rows() -> None:
    lens = [200, 3, 64]
    case = paged_case([2, 2, 2], lens, 16)
    q, cache = inputs(case, 4, torch.float32)
    order = torch.tensor([2, 0, 1])
    moved = dataclasses.replace(
        case.batch, seq_lens=case.batch.seq_lens[order], block_table=case.batch.block_table[order]
    )
    plain, _ = mla_decode(q, cache, case.batch, LORA_RANK, SCALE)
    permuted, _ = mla_decode(q.view(3, 2, 4, -1)[order].flatten(0, 1), cache, moved, LORA_RANK, SCALE)
    torch.testing.assert_close(permuted.view(3, 2, 4, -1), plain.view(3, 2, 4, -1)[order], rtol=1e-5, atol=1e-6)


def test_strided_queries() -> None:
    case = paged_case([2, 1], [70, 5], 64)
    q, cache = inputs(case, 4, torch.float32)
    wide = torch.full((q.shape[0], 6, q.shape[2] + 8), torch.nan)
    wide[:, 1:5, : q.shape[2]] = q
    out, _ = mla_decode(wide[:, 1:5, : q.shape[2]], cache, case.batch, LORA_RANK, SCALE)
    expected, _ = mla_decode(q, cache, case.batch, LORA_RANK, SCALE)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("split_tokens", [0, 64])
def test_a_plan_covers_every_key_once(split_tokens: int) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(6):
        seq_lens = torch.randint(0, 900, (7,), generator=generator).tolist()
        query_lens = torch.randint(0, 5, (7,), generator=generator).tolist()
        case = paged_case(query_lens, seq_lens, 64)
        plan = plan_mla_decode(case.batch, 16, 64, split_tokens)
        assert isinstance(plan, TritonDecodePlan)
        assert_covers(plan, case.batch)


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


def test_wrong_arguments_are_named() -> None:
    case = paged_case([1], [5], 16)
    q, cache = inputs(case, 4, torch.float32)
    other = dataclasses.replace(case.batch, decode_plan=plan_mla_decode(case.batch, 8, 16))
    foreign = dataclasses.replace(case.batch, decode_plan=DecodePlan(tensors=()))
    for call, message in (
        (lambda: mla_decode(q, cache.half(), case.batch, LORA_RANK, SCALE), "latent_cache"),
        (lambda: mla_decode(q, cache, case.batch, 24, SCALE), "kv_lora_rank: got width 24"),
        (lambda: mla_decode(q, cache, case.batch, LORA_RANK, -1.0), "softmax_scale"),
        (lambda: mla_decode(q, cache, other, LORA_RANK, SCALE), "decode_plan: got for 8 heads"),
        (lambda: mla_decode(q, cache, foreign, LORA_RANK, SCALE), "DecodePlan"),
        (lambda: plan_mla_decode(case.batch, 4, 16, 48), "split_tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
