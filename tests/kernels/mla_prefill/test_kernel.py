"""Non-absorbed MLA attention in Triton-language's interpreter against the reference."""

import pytest
import torch

from kimi_kernels.mla_prefill import kernel, reference
from support.attention_cases import PagedCase, paged_case, random_contents, see_more_keys, with_a_key_to_spare
from support.interpreted import INTERPRETED
from support.row_errors import worst_row_error

pytestmark = INTERPRETED
HEADS, NOPE, ROPE, LORA_RANK, VALUE = 2, 16, 16, 32, 32
SCALE = 0.2
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""norm(error) / norm(row). Narrow types: up-projected keys and values are rounded too, bfloat16 towards zero in the
interpreter."""


def check(case: PagedCase, dtype: torch.dtype = torch.float32) -> None:
    assert error_of(case, dtype) < TOLERANCE[dtype]


def error_of(case: PagedCase, dtype: torch.dtype, num_more_keys: int = 0) -> float:
    """The error of the worst row. num_more_keys: the kernel's rows see so many keys more than the reference's.

    Queries and up-projections of unit gain: scores of size one, so that a row attends to many keys and not to one.
    """
    generator = torch.Generator().manual_seed(2)
    contents = random_contents([len(slots) for slots in case.slots], LORA_RANK + ROPE)
    cache = case.cache(contents).to(dtype)
    q = torch.randn(case.batch.num_tokens, HEADS, NOPE + ROPE, generator=generator).to(dtype)
    w_uk = (torch.randn(HEADS, NOPE, LORA_RANK, generator=generator) * LORA_RANK**-0.5).to(dtype)
    w_uv = (torch.randn(HEADS, LORA_RANK, VALUE, generator=generator) * LORA_RANK**-0.5).to(dtype)
    out = kernel.mla_prefill(q, cache, w_uk, w_uv, see_more_keys(case.batch, num_more_keys), SCALE)
    expected = reference.mla_prefill(q, cache, w_uk, w_uv, case.batch, SCALE)
    assert out.dtype == dtype
    return worst_row_error(out, expected)


@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_new_tokens_over_a_cached_prefix(block_size: int) -> None:
    check(paged_case([20, 0, 3, 129, 1], [150, 4, 3, 200, 0], block_size, padding_rows=3))


@pytest.mark.parametrize("num_rows", [1, 127, 128, 131])
def test_a_whole_prompt(num_rows: int) -> None:
    check(paged_case([num_rows], [num_rows], 64))


def test_keys_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "CHUNK_ROWS", 128 * HEADS * 2)
    check(paged_case([10, 140], [300, 141], 64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types(dtype: torch.dtype) -> None:
    check(paged_case([30, 2], [60, 140], 64), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_causal_bound_that_is_off_by_one_shows(dtype: torch.dtype) -> None:
    """Planted fault."""
    case = with_a_key_to_spare(paged_case([30, 2], [61, 141], 64))
    check(case, dtype)
    for num_more_keys in (-1, 1):
        assert error_of(case, dtype, num_more_keys) > 4 * TOLERANCE[dtype]


def test_float8_latents() -> None:
    case = paged_case([9], [70], 64)
    contents = random_contents([70], LORA_RANK + ROPE)
    cache = (case.cache(contents) / 0.25).to(torch.float8_e4m3fn)
    q = torch.randn(9, HEADS, NOPE + ROPE)
    w_uk, w_uv = torch.randn(HEADS, NOPE, LORA_RANK) / 6, torch.randn(HEADS, LORA_RANK, VALUE) / 6
    out = kernel.mla_prefill(q, cache, w_uk, w_uv, case.batch, SCALE, 0.25)
    expected = reference.mla_prefill(q, cache, w_uk, w_uv, case.batch, SCALE, 0.25)
    assert worst_row_error(out, expected) < TOLERANCE[torch.float32]


def test_wrong_arguments_are_named() -> None:
    case = paged_case([1], [5], 16)
    cache = case.cache(random_contents([5], LORA_RANK + ROPE))
    q, w_uk = torch.randn(1, HEADS, NOPE + ROPE), torch.randn(HEADS, NOPE, LORA_RANK)
    with pytest.raises(ValueError, match="w_uv: got shape"):
        kernel.mla_prefill(q, cache, w_uk, torch.randn(HEADS, LORA_RANK + 1, VALUE), case.batch, SCALE)
    with pytest.raises(ValueError, match=r"w_uk: got torch\.float16"):
        kernel.mla_prefill(q, cache, w_uk.half(), torch.randn(HEADS, LORA_RANK, VALUE), case.batch, SCALE)
