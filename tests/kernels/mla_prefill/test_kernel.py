"""Non-absorbed MLA attention in Triton-language's interpreter against the reference."""

import pytest
import torch

from kimi_kernels.mla_prefill import kernel, reference
from support.attention_cases import PagedCase, paged_case, random_contents
from support.interpreted import INTERPRETED

pytestmark = INTERPRETED
HEADS, NOPE, ROPE, LORA_RANK, VALUE = 2, 16, 16, 32, 32
SCALE = 0.2
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Narrow types: up-projected keys and values of size 6 are rounded too. bfloat16: towards zero in the interpreter."""


def check(case: PagedCase, dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator().manual_seed(2)
    contents = random_contents([len(slots) for slots in case.slots], LORA_RANK + ROPE)
    cache = case.cache(contents).to(dtype)
    q = torch.randn(case.batch.num_tokens, HEADS, NOPE + ROPE, generator=generator).to(dtype)
    w_uk = torch.randn(HEADS, NOPE, LORA_RANK, generator=generator).to(dtype)
    w_uv = torch.randn(HEADS, LORA_RANK, VALUE, generator=generator).to(dtype)
    out = kernel.mla_prefill(q, cache, w_uk, w_uv, case.batch, SCALE)
    expected = reference.mla_prefill(q, cache, w_uk, w_uv, case.batch, SCALE)
    assert out.dtype == dtype
    error = torch.linalg.vector_norm(out.double() - expected.double()) / torch.linalg.vector_norm(expected.double())
    assert error < TOLERANCE[dtype]
    assert torch.equal(out == 0, expected == 0) or dtype != torch.float32


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


def test_float8_latents() -> None:
    case = paged_case([9], [70], 64)
    contents = random_contents([70], LORA_RANK + ROPE)
    cache = (case.cache(contents) / 0.25).to(torch.float8_e4m3fn)
    q = torch.randn(9, HEADS, NOPE + ROPE)
    w_uk, w_uv = torch.randn(HEADS, NOPE, LORA_RANK), torch.randn(HEADS, LORA_RANK, VALUE)
    out = kernel.mla_prefill(q, cache, w_uk, w_uv, case.batch, SCALE, 0.25)
    expected = reference.mla_prefill(q, cache, w_uk, w_uv, case.batch, SCALE, 0.25)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_wrong_arguments_are_named() -> None:
    case = paged_case([1], [5], 16)
    cache = case.cache(random_contents([5], LORA_RANK + ROPE))
    q, w_uk = torch.randn(1, HEADS, NOPE + ROPE), torch.randn(HEADS, NOPE, LORA_RANK)
    with pytest.raises(ValueError, match="w_uv: got shape"):
        kernel.mla_prefill(q, cache, w_uk, torch.randn(HEADS, LORA_RANK + 1, VALUE), case.batch, SCALE)
    with pytest.raises(ValueError, match=r"w_uk: got torch\.float16"):
        kernel.mla_prefill(q, cache, w_uk.half(), torch.randn(HEADS, LORA_RANK, VALUE), case.batch, SCALE)
