"""Flash attention with the diagonals of later steps added, against the softmax written out."""

import pytest
import torch
from torch import Tensor

from kimi_nano.unrolled_attention import FlashUnrolled, plain_unrolled_attention, unrolled_attention


def parts(num_steps: int, device: str, dtype: torch.dtype, value_dim: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_steps)
    widths = [16] * (1 + num_steps) + [value_dim] * num_steps
    made = [torch.randn(2, 3, 37, width, generator=generator) for width in widths]
    return [part.to(device, dtype).requires_grad_() for part in made]


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_output_and_gradients_are_those_of_the_joint_softmax(num_steps: int) -> None:
    q, *rest = parts(num_steps, "cpu", torch.float32)
    keys, values = rest[:num_steps], rest[num_steps:]
    out = FlashUnrolled.apply(0.3, num_steps, q, *keys, *values)
    wanted = plain_unrolled_attention(q, keys, values, 0.3)
    torch.testing.assert_close(out, wanted)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        torch.autograd.grad(out, (q, *rest), weights), torch.autograd.grad(wanted, (q, *rest), weights)
    )


def test_later_rows_are_seen_by_their_own_start_alone() -> None:
    q, k0, k1, v0, v1 = parts(2, "cpu", torch.float32)
    before = plain_unrolled_attention(q, [k0, k1], [v0, v1], 0.3)
    with torch.no_grad():
        v1[:, :, 5] += 1
        v0[:, :, 30] += 1
    changed = (plain_unrolled_attention(q, [k0, k1], [v0, v1], 0.3) != before).any(dim=-1)[0, 0]
    assert changed.nonzero().flatten().tolist() == [5, *range(30, 37)]


@pytest.mark.gpu
@pytest.mark.parametrize("num_steps", [1, 4])
def test_on_a_gpu_in_bf16_with_narrow_values(num_steps: int) -> None:
    q, *rest = parts(num_steps, "cuda", torch.bfloat16, value_dim=8)
    keys, values = rest[:num_steps], rest[num_steps:]
    out = unrolled_attention(q, keys, values, 0.3)
    wide = [part.detach().float().requires_grad_() for part in (q, *rest)]
    wanted = plain_unrolled_attention(wide[0], wide[1 : 1 + num_steps], wide[1 + num_steps :], 0.3)
    torch.testing.assert_close(out.float(), wanted, atol=2e-2, rtol=2e-2)
    weights = torch.randn_like(wanted)
    gradients = torch.autograd.grad(out, (q, *rest), weights.bfloat16())
    for gradient, exact in zip(gradients, torch.autograd.grad(wanted, wide, weights), strict=True):
        torch.testing.assert_close(gradient.float(), exact, atol=5e-2, rtol=5e-2)
