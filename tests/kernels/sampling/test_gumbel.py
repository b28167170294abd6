"""Bits to Gumbel noise: accuracy against float64, both ends, and the distribution."""

import math

import pytest
import torch

from kimi_kernels.sampling.gumbel import gumbel_from_bits
from kimi_kernels.sampling.philox import noise_bits

EULER_GAMMA = 0.5772156649015329


def exact_gumbel(bits: torch.Tensor) -> torch.Tensor:
    """float64, with log1p above one half so that it stays accurate there."""
    below = (bits.double() + 0.5) / 2**32
    above = ((2**32 - 1 - bits).double() + 0.5) / 2**32
    return -torch.where(bits < 2**31, -below.log(), -torch.log1p(-above)).log()


@pytest.fixture(scope="module")
def patterns() -> torch.Tensor:
    """Ten million random ones, both ends, the middle, and around every power of two."""
    generator = torch.Generator().manual_seed(1)
    powers = torch.tensor([2**k + d for k in range(32) for d in (-1, 0, 1)])
    near = torch.arange(50_000)
    parts = (
        torch.randint(0, 2**32, (10_000_000,), generator=generator),
        near,
        2**32 - 1 - near,
        2**31 - 25_000 + near,
        powers.clamp(min=0),
        2**32 - 1 - powers.clamp(min=0),
    )
    return torch.cat(parts)


def test_close_to_float64_and_finite(patterns: torch.Tensor) -> None:
    # Two logarithms of about one unit in the last place each: 2^-23 twice, and the error of the first passes on.
    for chunk in patterns.split(2_000_000):
        noise, exact = gumbel_from_bits(chunk), exact_gumbel(chunk)
        assert noise.dtype == torch.float32
        assert noise.isfinite().all()
        error = (noise.double() - exact).abs() / exact.abs().clamp(min=1.0)
        assert error.max() < 3.2e-7


def test_extremes() -> None:
    bits = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1])
    expected = [-3.1299946, -3.0807738, 0.36651292, 0.36651292, 0.36651292, 21.775243, 22.873857]
    torch.testing.assert_close(gumbel_from_bits(bits), torch.tensor(expected), rtol=0, atol=2e-6)


def test_grows_with_the_bits() -> None:
    """It grows up to rounding: a step back is at most one unit in the last place, and rare."""
    for start in (0, 2**31 - 100_000, 2**30 - 100_000, 3 * 2**30 - 100_000, 2**32 - 200_000):
        noise = gumbel_from_bits(torch.arange(start, start + 200_000))
        steps = noise[1:] - noise[:-1]
        assert (steps >= -2.5e-7 * noise[1:].abs().clamp(min=1)).all()


def test_moments_and_kolmogorov_smirnov() -> None:
    noise = gumbel_from_bits(noise_bits(torch.tensor([42]), torch.tensor([7]), 1_000_000))[0].double()
    count = noise.numel()
    assert abs(noise.mean().item() - EULER_GAMMA) < 5 * math.sqrt(math.pi**2 / 6 / count)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.01)
    ordered = torch.exp(-torch.exp(-noise.sort().values))
    steps = torch.arange(1, count + 1, dtype=torch.float64) / count
    distance = torch.maximum((ordered - steps).abs().max(), (ordered - steps + 1 / count).abs().max())
    assert distance < 1.63 / math.sqrt(count)  # the 1 % point
