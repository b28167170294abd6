"""MXFP4's formulas, from its definition (OCP Microscaling Formats, version 1.0, sections 5.3.3 and 6.3)."""

import pytest
import torch

from kimi_kernels.quantization.mxfp4 import E2M1_VALUES, dequantize_mxfp4, quantize_mxfp4
from kimi_kernels.weights import Mxfp4Weight


def e2m1(code: int) -> float:
    """Sign, two bits of exponent (bias 1, 0 is subnormal), one of mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if code & 8 else magnitude


def test_every_code_with_every_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(2)[:256].view(1, 256).expand(255, 256).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).view(255, 1).expand(255, 16).contiguous()
    got = dequantize_mxfp4(Mxfp4Weight(codes=codes, scales=scales)).double()
    values = torch.tensor([e2m1(code) for byte in range(256) for code in (byte & 15, byte >> 4)], dtype=torch.float64)
    expected = values * torch.exp2(torch.arange(255, dtype=torch.float64).view(255, 1) - 127)
    # 6 * 2^127 is more than float32 has.
    assert torch.equal(got[:253], expected[:253])


def test_a_scale_that_is_not_a_number_spoils_its_group() -> None:
    weight = Mxfp4Weight(
        codes=torch.zeros(1, 32, dtype=torch.uint8), scales=torch.tensor([[255, 0]], dtype=torch.uint8)
    )
    got = dequantize_mxfp4(weight)
    assert got[:, :32].isnan().all() and torch.equal(got[:, 32:], torch.zeros(1, 32))


def test_codes_are_the_nearest() -> None:
    torch.manual_seed(0)
    weight = torch.randn(2, 40, 96)
    weight[0, 0] = 0
    quantised = quantize_mxfp4(weight)
    plain = dequantize_mxfp4(quantised)
    grid = torch.tensor([sign * value for value in E2M1_VALUES for sign in (1, -1)])
    steps = torch.exp2(quantised.scales.float() - 127).unsqueeze(-1)
    grouped = weight.unflatten(-1, (-1, 32))
    nearest = (grouped.unsqueeze(-1) - steps.unsqueeze(-1) * grid).abs().amin(dim=-1)
    assert torch.equal((grouped - plain.unflatten(-1, (-1, 32))).abs(), nearest)
    # The largest magnitude of a group is between 4 and 8 steps; beyond 6 it is cut.
    largest = grouped.abs().amax(dim=-1, keepdim=True)[grouped.abs().amax(dim=-1) > 0]
    assert (largest.squeeze(-1) / steps.squeeze(-1)[grouped.abs().amax(dim=-1) > 0] >= 4).all()
    assert torch.equal(quantize_mxfp4(plain).codes & 0x77, quantised.codes & 0x77)


def test_ties_go_to_the_even_code() -> None:
    weight = torch.zeros(1, 32)
    weight[0, :8] = torch.tensor([0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5.0, 4.0])
    expected = torch.tensor([0.0, 1.0, -1.0, 2.0, 2.0, -4.0, 4.0, 4.0])
    assert torch.equal(dequantize_mxfp4(quantize_mxfp4(weight))[0, :8], expected)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (Mxfp4Weight(codes=torch.zeros(2, 16), scales=torch.zeros(2, 1)), "^codes: got torch.float32"),
        (
            Mxfp4Weight(codes=torch.zeros(2, 32, dtype=torch.uint8), scales=torch.zeros(2, 1, dtype=torch.uint8)),
            r"^scales: got shape \[2, 1\], expected \[2, 2\]",
        ),
        (
            Mxfp4Weight(codes=torch.zeros(2, 8, dtype=torch.uint8), scales=torch.zeros(2, 1, dtype=torch.uint8)),
            "^codes: got 16 columns, expected a multiple of 32",
        ),
    ],
)
def test_what_does_not_fit_is_refused(weight: Mxfp4Weight, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dequantize_mxfp4(weight)
