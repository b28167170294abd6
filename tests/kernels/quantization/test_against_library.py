"""The weight formats against the compressed-tensors library, where it is installed (a GPU host may lack it)."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_kernels.quantization.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from kimi_kernels.quantization.plain import dequantize_fp8, dequantize_int4, pack_nibbles, unpack_nibbles
from kimi_kernels.weights import Fp8Weight, Int4Weight, Mxfp4Weight


def library(name: str) -> Any:
    """Import a module of the library. Not at this file's top, where each process that collects tests would do so."""
    return pytest.importorskip(f"compressed_tensors.{name}")


def dequantize(values: Tensor, scales: Tensor, **args: Any) -> Tensor:
    """The matrix that the library makes, in the dtype of its scales."""
    forward, quantization = library("quantization.lifecycle.forward"), library("quantization")
    result: Tensor = forward.dequantize(values, scales, args=quantization.QuantizationArgs(**args))
    return result


@pytest.mark.parametrize("shape", [(1, 8), (3, 64), (65, 160), (2, 3, 32)])
def test_nibbles_pack_as_the_library_packs_them(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    codes = torch.randint(-8, 8, shape, dtype=torch.int8)
    packed = pack_nibbles(codes)
    assert packed.dtype == torch.int32
    assert torch.equal(packed, library("compressors").pack_to_int32(codes, 4))
    assert torch.equal(unpack_nibbles(packed), codes)


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "group_size"), [((1, 32), 32), ((63, 160), 32), ((5, 128), 64), ((4, 24), 24), ((3, 40), 8)]
)
def test_int4_dequantises_as_the_library_does(
    shape: tuple[int, int], group_size: int, scale_dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    packed = torch.randint(-(2**31), 2**31, (shape[0], shape[1] // 8)).to(torch.int32)
    scales = (torch.rand(shape[0], shape[1] // group_size) + 0.01).to(scale_dtype)
    got = dequantize_int4(Int4Weight(packed=packed, scales=scales, group_size=group_size))
    codes = library("compressors").unpack_from_int32(packed, 4, torch.Size(shape))
    form = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    assert torch.equal(got, dequantize(codes, scales.float(), **form))
    assert torch.equal(got.to(scale_dtype), dequantize(codes, scales, **form))


@pytest.mark.parametrize(("shape", "block_size"), [((1, 1), 128), ((128, 256), 128), ((130, 200), 128), ((63, 65), 16)])
def test_fp8_dequantises_as_the_library_does(shape: tuple[int, int], block_size: int) -> None:
    torch.manual_seed(0)
    values = (torch.randn(shape) * 100).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // block_size), -(-shape[1] // block_size)) + 0.01
    weight = Fp8Weight(values=values, scales=scales, block_size=block_size)
    form = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [block_size] * 2}
    assert torch.equal(dequantize_fp8(weight), dequantize(weight.values, weight.scales, **form))


MXFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "symmetric": True,
    "dynamic": False,
    "group_size": 32,
    "scale_dtype": "torch.uint8",
}


def mxfp4_scheme() -> Any:
    quantization = library("quantization")
    return quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**MXFP4))


@pytest.mark.parametrize("shape", [(1, 32), (63, 160)])
def test_mxfp4_dequantises_as_the_library_does(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (shape[0], shape[1] // 2), dtype=torch.uint8)
    scales = torch.randint(90, 140, (shape[0], shape[1] // 32), dtype=torch.uint8)
    stored = {"weight_packed": codes, "weight_scale": scales}
    expected = library("compressors").MXFP4PackedCompressor.decompress(stored, mxfp4_scheme())["weight"]
    got = dequantize_mxfp4(Mxfp4Weight(codes=codes, scales=scales))
    assert torch.equal(got.to(expected.dtype), expected)


def test_mxfp4_rounds_as_the_library_does() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 160)
    ours = quantize_mxfp4(weight)
    scale = torch.exp2(ours.scales.float() - 127)
    expected = library("compressors").MXFP4PackedCompressor.compress(
        {"weight": weight, "weight_scale": scale}, mxfp4_scheme()
    )
    assert torch.equal(ours.codes, expected["weight_packed"])
    assert torch.equal(ours.scales, expected["weight_scale"])
