"""Weights cut into tiles, read back by the layout's description."""

import pytest
import torch
from torch import Tensor

from kimi_kernels.quantization.mxfp4 import quantize_mxfp4
from kimi_kernels.quantization.plain import dequantize, quantize_fp8, quantize_int4
from kimi_kernels.quantization.tiles import MXFP4_BITS, WeightTiles, cut_tiles, gate_up_rows, identity_rows
from kimi_kernels.weights import Int4Weight, Mxfp4Weight, Weight


def read_back(cut: WeightTiles) -> Tensor:
    """[E, padded rows, padded columns] float32, from the words of each tile."""
    words = cut.tiles
    if cut.kind == "float":
        values = words.float()
    elif cut.kind == "int4":
        nibbles = torch.stack([words.int() >> 4 * plane & 15 for plane in range(4)], dim=-2) - 8
        scales = cut.scales.unsqueeze(-1).view(torch.bfloat16).float() / 128  # 2^7 too large
        values = (nibbles * scales.unsqueeze(-1)).flatten(-2)
    elif cut.kind == "mxfp4":
        halves = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12])
        planes = [(1 - 2 * (words >> sign & 1)) * halves[(words >> low & 7).int()] for sign, low in MXFP4_BITS]
        bits = cut.scales.long() & 0xFFFFFFFF
        pairs = [bits, bits >> 8 | bits << 24]
        exponents = [pairs[plane // 2] >> (7 + 16 * (plane % 2)) & 255 for plane in range(4)]
        scales = torch.stack(exponents, dim=-1).int() - 127 - 126  # 126 too large
        values = torch.ldexp(torch.stack(planes, dim=-2) / 2, scales.unsqueeze(-1)).flatten(-2)
    else:
        planes = torch.stack([(words.int() >> 8 * plane & 255).to(torch.uint8) for plane in range(2)], dim=-2)
        values = planes.view(torch.float8_e4m3fn).float().flatten(-2) * cut.scales.unsqueeze(-1)
    return values.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def weight_of(kind: str, *shape: int) -> Weight:
    torch.manual_seed(0)
    plain = torch.randn(shape)
    formats = {"int4": quantize_int4, "mxfp4": quantize_mxfp4, "fp8": quantize_fp8, "float": lambda weight: weight}
    return formats[kind](plain)


@pytest.mark.parametrize("kind", ["int4", "mxfp4", "fp8", "float"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (128, 128), (130, 320), (256, 96)])
def test_rows_in_order(kind: str, rows: int, columns: int) -> None:
    weight = weight_of(kind, 2, rows, columns)
    values = read_back(cut_tiles(weight, identity_rows(rows, torch.device("cpu"))))
    assert torch.equal(values[:, :rows, :columns], dequantize(weight))
    assert not values[:, rows:].any() and not values[:, :, columns:].any()


@pytest.mark.parametrize("kind", ["int4", "mxfp4", "fp8"])
@pytest.mark.parametrize("intermediate", [64, 20, 136])
def test_gate_and_up_alternate_in_stripes_of_eight(kind: str, intermediate: int) -> None:
    weight = weight_of(kind, 1, 2 * intermediate, 64)
    values = read_back(cut_tiles(weight, gate_up_rows(intermediate, torch.device("cpu"))))[0, :, :64]
    gate, up = dequantize(weight)[0].chunk(2)
    for column in range(intermediate):
        row = column // 8 * 16 + column % 8
        assert torch.equal(values[row], gate[column])
        assert torch.equal(values[row + 8], up[column])
    assert int(values.any(dim=1).sum()) == 2 * intermediate


def test_scales_of_larger_groups_and_types() -> None:
    weight = quantize_int4(torch.randn(1, 128, 256), group_size=128)
    wide = Int4Weight(packed=weight.packed, scales=weight.scales.float(), group_size=128)
    for given in (weight, wide):
        values = read_back(cut_tiles(given, identity_rows(128, torch.device("cpu"))))
        assert torch.equal(values, dequantize(weight))


def test_wrong_scales_are_refused() -> None:
    weight = quantize_int4(torch.randn(1, 128, 64))
    with pytest.raises(ValueError, match=r"scales: got shape \[1, 128, 1\], expected \[1, 128, 2\]"):
        cut_tiles(
            Int4Weight(packed=weight.packed, scales=weight.scales[..., :1]), identity_rows(128, torch.device("cpu"))
        )


def test_mxfp4_scales_beyond_the_kernels_range_are_refused() -> None:
    codes = torch.ones(1, 128, 16, dtype=torch.uint8)
    largest = Mxfp4Weight(codes=codes, scales=torch.full((1, 128, 1), 128, dtype=torch.uint8))
    rows = identity_rows(128, torch.device("cpu"))
    assert torch.equal(read_back(cut_tiles(largest, rows))[..., :32], dequantize(largest))
    beyond = Mxfp4Weight(codes=codes, scales=torch.full((1, 128, 1), 129, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"scales: got 2 \*\* 2 or NaN, expected at most 2"):
        cut_tiles(beyond, rows)
