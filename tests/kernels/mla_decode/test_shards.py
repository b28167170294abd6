"""Attention over a part of each sequence's keys, told how many each row sees: parts add up to the whole."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kimi_kernels.mla_decode import cpu, kernel, reference
from kimi_kernels.mla_decode.kernel import plan_mla_decode
from support.attention_cases import PagedCase, paged_case, random_contents
from support.attention_shards import Shard, merge_shards, shards_of
from support.interpreted import INTERPRETED
from support.row_errors import worst_row_error

pytestmark = INTERPRETED
LORA_RANK, ROPE_DIM, HEADS = 32, 16, 4
SCALE = 0.17
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3}
"""norm(error) / norm(row). float16: weights and results rounded to 2^-11."""
LENGTHS = [0, 1, 3, *range(64, 72)]
"""Fewer keys than rows and none, then every alignment of the last rows to eight keys that are dealt out."""
ROWS = 4
CASE = paged_case([ROWS] * len(LENGTHS), LENGTHS, 16, padding_rows=2)
SHARDS = [(2, 1), (4, 1), (8, 1), (2, 3), (2, 4)]
"""(Shards, keys dealt at a time)."""

MlaDecode = Callable[..., tuple[Tensor, Tensor | None]]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
    q = torch.randn(CASE.batch.num_tokens, HEADS, LORA_RANK + ROPE_DIM, generator=torch.Generator().manual_seed(1))
    return q.to(dtype), [content.to(dtype) for content in random_contents(LENGTHS, LORA_RANK + ROPE_DIM)]


def attend(mla_decode: MlaDecode, q: Tensor, shard: Shard, split_tokens: int = 0) -> tuple[Tensor, Tensor]:
    batch = shard.case.batch
    if mla_decode is kernel.mla_decode:
        plan = plan_mla_decode(batch, HEADS, shard.case.block_size, split_tokens)
        batch = dataclasses.replace(batch, decode_plan=plan)
    cache = shard.case.cache(shard.contents)
    out, lse = mla_decode(q, cache, batch, LORA_RANK, SCALE, return_lse=True, row_keys=shard.row_keys)
    assert lse is not None
    seen = (shard.row_keys > 0)[: q.shape[0] - 2]
    assert torch.equal(lse[:-2].isfinite().all(-1), seen)
    assert (lse[:-2][~seen] == -torch.inf).all() and not out[:-2][~seen].any()
    assert (lse[-2:] == -torch.inf).all() and not out[-2:].any()
    return out, lse


def check(mla_decode: MlaDecode, num_shards: int, run: int, dtype: torch.dtype, split_tokens: int = 0) -> None:
    q, contents = inputs(dtype)
    shards = shards_of(CASE, contents, num_shards, run)
    assert any((shard.row_keys[: ROWS * len(LENGTHS)] == 0).any() for shard in shards)
    out, lse = merge_shards(*zip(*[attend(mla_decode, q, shard, split_tokens) for shard in shards], strict=True))
    expected, expected_lse = reference.mla_decode(q, CASE.cache(contents), CASE.batch, LORA_RANK, SCALE, 1.0, True)
    assert expected_lse is not None
    assert worst_row_error(out, expected) < TOLERANCE[dtype]
    torch.testing.assert_close(lse, expected_lse.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_shards", "run"), SHARDS)
@pytest.mark.parametrize("mla_decode", [reference.mla_decode, cpu.mla_decode, kernel.mla_decode])
def test_shards_add_up(mla_decode: MlaDecode, num_shards: int, run: int) -> None:
    check(mla_decode, num_shards, run, torch.float32)


def test_shards_in_fixed_splits_and_narrow_types_add_up() -> None:
    check(kernel.mla_decode, 2, 1, torch.float16, 64)


def test_a_wrong_number_of_keys_shows() -> None:
    """Planted fault."""
    q, contents = inputs()
    shard = shards_of(CASE, contents, 2, 1)[0]
    out, _ = attend(kernel.mla_decode, q, shard)
    fewer = dataclasses.replace(shard, row_keys=(shard.row_keys - 1).clamp(min=0))
    assert worst_row_error(attend(kernel.mla_decode, q, fewer)[0], out) > 4 * TOLERANCE[torch.float32]


def one_row_twice() -> tuple[PagedCase, Tensor, Tensor]:
    case = paged_case([2], [9])
    return case, torch.randn(2, HEADS, LORA_RANK + ROPE_DIM), case.cache(random_contents([9], LORA_RANK + ROPE_DIM))


@pytest.mark.parametrize(
    ("row_keys", "message"),
    [
        (torch.tensor([5, 4], dtype=torch.int32), r"row_keys of sequence 0: got \[5, 4\], expected to rise from 0"),
        (torch.tensor([5, 10], dtype=torch.int32), r"row_keys of sequence 0: got \[5, 10\], .* at most 9"),
        (torch.tensor([-1, 4], dtype=torch.int32), r"row_keys of sequence 0: got \[-1, 4\]"),
        (torch.tensor([4], dtype=torch.int32), r"^row_keys: got shape \[1\], expected \[2\]"),
        (torch.tensor([4, 5]), "^row_keys: got torch.int64"),
    ],
)
def test_numbers_that_cannot_be_are_named(row_keys: Tensor, message: str) -> None:
    case, q, cache = one_row_twice()
    with pytest.raises(ValueError, match=message):
        reference.mla_decode(q, cache, case.batch, LORA_RANK, SCALE, row_keys=row_keys)


@pytest.mark.parametrize("row_keys", [torch.tensor([4], dtype=torch.int32), torch.tensor([4, 5])])
def test_the_kernel_names_a_wrong_tensor(row_keys: Tensor) -> None:
    case, q, cache = one_row_twice()
    with pytest.raises(ValueError, match=r"^row_keys: got"):
        kernel.mla_decode(q, cache, case.batch, LORA_RANK, SCALE, row_keys=row_keys)
