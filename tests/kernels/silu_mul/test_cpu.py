"""The CPU kernel set's activation against the reference's float64 one."""

import pytest
import torch

from kimi_kernels.silu_mul import reference
from kimi_kernels.silu_mul.cpu import silu_mul


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 64])
@pytest.mark.parametrize("width", [32, 128, 160, 48, 7])
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_it_equals_the_reference(num_tokens: int, width: int, scale: float) -> None:
    torch.manual_seed(width)
    gate_up = torch.randn(num_tokens, 2 * width) * scale
    before = gate_up.clone()
    torch.testing.assert_close(silu_mul(gate_up), reference.silu_mul(gate_up), rtol=1e-6, atol=1e-30)
    assert torch.equal(gate_up, before)


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="gate_up: got 7 columns"):
        silu_mul(torch.randn(2, 7))
