"""The latent cache write in Triton-language's interpreter against the reference."""

import pytest
import torch
from torch import Tensor

from kimi_kernels.rms_norm.reference import rms_norm
from kimi_kernels.store_latent import kernel, kernel_query, reference
from support.interpreted import INTERPRETED

pytestmark = INTERPRETED
EPS = 1e-6
WIDTH, ROPE_DIM, BLOCKS, BLOCK_SIZE = 48, 16, 5, 16
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""One rounding to the type; the interpreter rounds bfloat16 towards zero."""


def stored(store: object, kv_a: Tensor, slots: Tensor, dtype: torch.dtype, interleaved: bool, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(WIDTH, generator=generator).to(kv_a.dtype)
    cos_sin = torch.randn(40, ROPE_DIM, generator=generator)
    positions = torch.randint(40, (kv_a.shape[0],), generator=generator)
    cache = torch.full((BLOCKS, BLOCK_SIZE, WIDTH + ROPE_DIM), 7.0).to(dtype)
    store(kv_a, weight, EPS, cos_sin, positions, interleaved, cache, slots, scale)  # type: ignore[operator]
    return cache.float()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("interleaved", [True, False])
def test_rows_land_in_their_slots_and_nowhere_else(dtype: torch.dtype, interleaved: bool) -> None:
    kv_a = torch.randn(6, WIDTH + ROPE_DIM).to(dtype)
    slots = torch.tensor([79, 0, -1, 17, 16, -1])
    out = stored(kernel.store_latent, kv_a, slots, dtype, interleaved, 1.0)
    expected = stored(reference.store_latent, kv_a, slots, dtype, interleaved, 1.0)
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_float8_with_a_scale_and_values_past_its_range() -> None:
    kv_a = torch.randn(4, WIDTH + ROPE_DIM)
    kv_a[1, WIDTH:] = 1e4
    slots = torch.tensor([3, 1, 2, 64])
    out = stored(kernel.store_latent, kv_a, slots, torch.float8_e4m3fn, True, 0.03)
    expected = stored(reference.store_latent, kv_a, slots, torch.float8_e4m3fn, True, 0.03)
    # The interpreter drops the carry of a value that rounds up to a power of two.
    assert (out != expected).float().mean() < 0.01


def test_many_tokens_in_rows_that_lie_apart() -> None:
    wide = torch.full((1100, WIDTH + ROPE_DIM + 8), torch.nan)
    wide[:, 8:] = torch.randn(1100, WIDTH + ROPE_DIM)
    slots = torch.full((1100,), -1)
    slots[::22] = torch.randperm(BLOCKS * BLOCK_SIZE)[:50]
    out = stored(kernel.store_latent, wide[:, 8:], slots, torch.float32, True, 1.0)
    torch.testing.assert_close(
        out, stored(reference.store_latent, wide[:, 8:], slots, torch.float32, True, 1.0), rtol=2e-6, atol=2e-6
    )


@pytest.mark.parametrize(("num_tokens", "interleaved"), [(6, True), (6, False), (1100, True)])
def test_queries_are_normed_beside_the_write(num_tokens: int, interleaved: bool) -> None:
    """1,100 take two launches, as one program writes several of so many."""
    both = torch.randn(num_tokens, 40 + WIDTH + ROPE_DIM, dtype=torch.float16)
    slots = torch.full((num_tokens,), -1)
    slots[: 4 * (num_tokens // 6) : num_tokens // 6] = torch.tensor([79, 0, 17, 16])
    weight = torch.randn(40).half()
    normed: list[Tensor] = []

    def store(kv_a: Tensor, *arguments: object) -> None:
        normed.append(kernel_query.norm_store_latent(both[:, :40], weight, kv_a, *arguments))  # type: ignore[arg-type]

    out = stored(store, both[:, 40:], slots, torch.float16, interleaved, 1.0)
    expected = stored(reference.store_latent, both[:, 40:], slots, torch.float16, interleaved, 1.0)
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(normed[0], rms_norm(both[:, :40], weight, EPS), rtol=2e-3, atol=2e-3)


def test_a_query_that_does_not_fit_is_named() -> None:
    arguments = torch.ones(4), EPS, torch.ones(9, 2), torch.zeros(3, dtype=torch.int64), True, torch.zeros(2, 4, 6)
    slots = torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match="query: got shape"):
        kernel_query.norm_store_latent(torch.ones(3, 5), torch.ones(4), torch.ones(3, 6), *arguments, slots)
    bad = (*arguments[:-1], torch.zeros(2, 4, 7))
    with pytest.raises(ValueError, match="latent_cache: got shape"):
        kernel_query.norm_store_latent(torch.ones(3, 4), torch.ones(4), torch.ones(3, 6), *bad, slots)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="latent_cache"):
        kernel.store_latent(
            torch.ones(1, 20), torch.ones(16), EPS, torch.ones(3, 4), torch.zeros(1, dtype=torch.int64), True,
            torch.zeros(2, 16, 24), torch.zeros(1, dtype=torch.int64),
        )  # fmt: skip
