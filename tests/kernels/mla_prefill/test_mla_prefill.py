"""Non-absorbed MLA attention against its formula: the kernel, and the absorbed form that stands for it elsewhere."""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_kernels import KernelSet
from kimi_kernels.mla_prefill import kernel, naive
from support.attention_cases import PagedCase, paged_case, random_contents, see_more_keys, with_a_key_to_spare
from support.interpreted import INTERPRETED
from support.row_errors import worst_row_error

HEADS, NOPE, ROPE, LORA_RANK, VALUE = 2, 16, 16, 32, 32
SCALE = 0.2
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""norm(error) / norm(row). Narrow types: up-projected keys and values are rounded too, bfloat16 towards zero in the
interpreter."""
Ops = ModuleType | SimpleNamespace
ABSORBED = SimpleNamespace(mla_prefill=KernelSet.plain().mla_prefill)
every_implementation = pytest.mark.parametrize(
    "ops", [pytest.param(ABSORBED, id="absorbed"), pytest.param(kernel, id="kernel", marks=INTERPRETED)]
)


def inputs(case: PagedCase, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and up-projections of unit gain: scores of size one, so that a row attends to many keys."""
    generator = torch.Generator().manual_seed(2)
    contents = random_contents([len(slots) for slots in case.slots], LORA_RANK + ROPE)
    q = torch.randn(case.batch.num_tokens, HEADS, NOPE + ROPE, generator=generator)
    w_uk = torch.randn(HEADS, NOPE, LORA_RANK, generator=generator) * LORA_RANK**-0.5
    w_uv = torch.randn(HEADS, LORA_RANK, VALUE, generator=generator) * LORA_RANK**-0.5
    return q.to(dtype), case.cache(contents).to(dtype), w_uk.to(dtype), w_uv.to(dtype)


def error_of(ops: Ops, case: PagedCase, dtype: torch.dtype = torch.float32, num_more_keys: int = 0) -> float:
    """The error of the worst row. num_more_keys: the rows see so many keys more than the judge's."""
    given = inputs(case, dtype)
    out = ops.mla_prefill(*given, see_more_keys(case.batch, num_more_keys), SCALE)
    assert out.dtype == dtype
    return worst_row_error(out, naive.mla_prefill(*given, case.batch, SCALE))


def check(ops: Ops, case: PagedCase, dtype: torch.dtype = torch.float32) -> None:
    assert error_of(ops, case, dtype) < TOLERANCE[dtype]


@every_implementation
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_new_tokens_over_a_cached_prefix(ops: Ops, block_size: int) -> None:
    check(ops, paged_case([20, 0, 3, 129, 1], [150, 4, 3, 200, 0], block_size, padding_rows=3))


@every_implementation
@pytest.mark.parametrize("num_rows", [1, 127, 128, 131])
def test_a_whole_prompt(ops: Ops, num_rows: int) -> None:
    check(ops, paged_case([num_rows], [num_rows], 64))


@every_implementation
def test_keys_in_several_chunks(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "CHUNK_ROWS", 128 * HEADS * 2)
    check(ops, paged_case([10, 140], [300, 141], 64))


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types(ops: Ops, dtype: torch.dtype) -> None:
    check(ops, paged_case([30, 2], [60, 140], 64), dtype)


@every_implementation
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_causal_bound_that_is_off_by_one_shows(ops: Ops, dtype: torch.dtype) -> None:
    """Planted fault."""
    case = with_a_key_to_spare(paged_case([30, 2], [61, 141], 64))
    check(ops, case, dtype)
    for num_more_keys in (-1, 1):
        assert error_of(ops, case, dtype, num_more_keys) > 4 * TOLERANCE[dtype]


@every_implementation
def test_float8_latents(ops: Ops) -> None:
    case = paged_case([9], [70], 64)
    q, cache, w_uk, w_uv = inputs(case, torch.float32)
    given = (q, (cache / 0.25).to(torch.float8_e4m3fn), w_uk, w_uv, case.batch, SCALE, 0.25)
    assert worst_row_error(ops.mla_prefill(*given), naive.mla_prefill(*given)) < TOLERANCE[torch.float32]


CASE = paged_case([1, 2], [5, 20], 16)
Q, CACHE, W_UK, W_UV = inputs(CASE, torch.float32)


@every_implementation
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q[..., 1:]}, r"^q: got shape \[3, 2, 31\], expected \[3, 2, 32\]"),
        ({"q": torch.randn(3, 2, 64)[..., ::2]}, "^q: got column stride 2"),
        ({"w_uk": torch.randn(2, 16, 33)}, "^w_uv: .*expected .*33"),
        ({"w_uv": torch.randn(3, 32, 32)}, r"^w_uv: got shape \[3, 32, 32\], expected \[2, 32, any\]"),
        ({"latent_cache": CACHE[0]}, r"^latent_cache: got shape"),
        ({"latent_cache": CACHE[..., :3]}, "^w_uk: got 32 columns, expected at most latent_cache's 3"),
        ({"latent_cache": CACHE.transpose(0, 1)}, "^latent_cache: got strides"),
        ({"softmax_scale": -1.0}, "^softmax_scale: got -1.0"),
        ({"kv_scale": 0.0}, "^kv_scale: got 0.0"),
    ],
)
def test_a_wrong_argument_is_named(ops: Ops, change: dict[str, Any], message: str) -> None:
    given = {"q": Q, "latent_cache": CACHE, "w_uk": W_UK, "w_uv": W_UV, "batch": CASE.batch, "softmax_scale": SCALE}
    with pytest.raises(ValueError, match=message):
        ops.mla_prefill(**(given | change))


@pytest.mark.parametrize("change", [{"w_uk": W_UK.half()}, {"latent_cache": CACHE.half()}])
def test_what_the_kernel_does_not_take_is_named(change: dict[str, Any]) -> None:
    given = {"q": Q, "latent_cache": CACHE, "w_uk": W_UK, "w_uv": W_UV, "batch": CASE.batch, "softmax_scale": SCALE}
    with pytest.raises(ValueError, match=r": got torch\.float16"):
        kernel.mla_prefill(**(given | change))
