"""The CPU kernel set's cache write against the reference's."""

import pytest
import torch
from torch import Tensor

from kimi_kernels.store_latent import reference
from kimi_kernels.store_latent.cpu import store_latent

EPS = 1e-6


def arguments(num_tokens: int, kv_lora_rank: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kv_a = torch.randn(num_tokens, kv_lora_rank + width + 5)[:, 5:]
    return kv_a, torch.randn(kv_lora_rank), torch.randn(40, width), torch.randint(40, (num_tokens,))


@pytest.mark.parametrize("num_tokens", [0, 1, 4, 33])
@pytest.mark.parametrize(("kv_lora_rank", "width"), [(64, 16), (512, 64), (31, 6)])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_written_where_they_belong_and_nowhere_else(
    num_tokens: int, kv_lora_rank: int, width: int, interleaved: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(num_tokens)
    kv_a, weight, cos_sin, positions = arguments(num_tokens, kv_lora_rank, width)
    slots = torch.randperm(48)[:num_tokens]
    slots[::3] = -1
    caches = torch.full((2, 3, 16, kv_lora_rank + width), 7.0, dtype=dtype).unbind()
    for op, cache in zip((store_latent, reference.store_latent), caches, strict=True):
        op(kv_a, weight, EPS, cos_sin, positions, interleaved, cache, slots)
    tolerance = 2e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(caches[0], caches[1], rtol=tolerance, atol=tolerance)
    untouched = torch.ones(48, dtype=torch.bool)
    untouched[slots[slots >= 0]] = False
    assert (caches[0].view(48, -1)[untouched] == 7.0).all()


@pytest.mark.parametrize(("dtype", "kv_scale"), [(torch.float32, 0.5), (torch.float8_e4m3fn, 1.0)])
def test_scaled_caches_hold_the_references_bytes(dtype: torch.dtype, kv_scale: float) -> None:
    kv_a, weight, cos_sin, positions = arguments(3, 32, 16)
    caches = torch.zeros(2, 1, 16, 48).to(dtype).unbind()
    for op, cache in zip((store_latent, reference.store_latent), caches, strict=True):
        op(kv_a, weight, EPS, cos_sin, positions, True, cache, torch.tensor([4, 0, 9]), kv_scale)
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))


def test_a_cache_of_another_width_is_refused() -> None:
    kv_a, weight, cos_sin, positions = arguments(2, 32, 16)
    with pytest.raises(ValueError, match="latent_cache: got shape"):
        store_latent(kv_a, weight, EPS, cos_sin, positions, True, torch.zeros(1, 16, 64), torch.tensor([0, 1]))
