"""The bit tricks of int4 and mxfp4, which only a GPU runs: their PTX carried out here on every code."""

import re

import pytest
import torch
from torch import Tensor

from kimi_kernels.quantization import kernel_tiles, naive
from kimi_kernels.quantization.tiles import cut_tiles, identity_rows
from kimi_kernels.weights import Int4Weight, Mxfp4Weight

INSTRUCTION = re.compile(r"(mov|and|shl|shr|mul\.lo|lop3|fma\.rn)\.(?:[bu]32|bf16x2) ([^;]+);")
A_AND_B_OR_C = "0xea"


def run_ptx(assembly: str, words: Tensor) -> Tensor:
    """`$0` of the instructions where `$1` is `words`: int64, 32 bits each."""
    registers = {"$1": words}

    def value(operand: str) -> Tensor:
        return registers[operand] if operand in registers else torch.tensor(int(operand, 0))

    for name, operands in INSTRUCTION.findall(assembly):
        target, *sources = operands.split(", ")
        if name == "mov":
            registers[target] = value(sources[0])
            continue
        a, b = value(sources[0]), value(sources[1])
        if name == "lop3":
            assert sources[3] == A_AND_B_OR_C, "the one truth table in use"
            registers[target] = a & b | value(sources[2])
        elif name == "fma.rn":
            # Exact in float64: what a bf16 cannot hold would show as another value.
            factors, offset = (_bf16_pair(a).double(), _bf16_pair(b).double()), _bf16_pair(value(sources[2])).double()
            halves = (factors[0] * factors[1] + offset).bfloat16().view(torch.int16).long() & 0xFFFF
            registers[target] = halves[..., 0] | halves[..., 1] << 16
        else:
            result = {"and": a & b, "shl": a << b, "shr": a >> b, "mul.lo": a * b}[name]
            registers[target] = result & 0xFFFFFFFF
    return registers["$0"]


def _bf16_pair(registers: Tensor) -> Tensor:
    """[..., 2], the lower half first."""
    return torch.stack([registers & 0xFFFF, registers >> 16], dim=-1).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("plane", range(4))
def test_int4_codes_become_bf16(plane: int) -> None:
    """Two words a register, every pair of words' nibbles at this place, the others' bits at random."""
    torch.manual_seed(plane)
    packed = torch.randint(-(2**31), 2**31, (1, 128, 16), dtype=torch.int64).to(torch.int32)
    weight = Int4Weight(packed=packed, scales=torch.ones(1, 128, 4))
    cut = cut_tiles(weight, identity_rows(128, torch.device("cpu")))
    registers = cut.tiles[0, 0, 0].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    found = _bf16_pair(run_ptx(getattr(kernel_tiles, f"INT4_ASM_{plane}").value, registers)).flatten(-2)
    scales = cut.scales[0, 0, 0].unsqueeze(-1).view(torch.bfloat16)
    expected = naive.dequantize(weight)[0, :, 32 * plane : 32 * plane + 32].float()
    assert torch.equal(found.float() * scales[:, plane : plane + 1].float(), expected)
    assert set(expected.flatten().tolist()) == set(range(-8, 8))


@pytest.mark.parametrize("plane", range(4))
def test_mxfp4_codes_become_bf16(plane: int) -> None:
    """Two words a register, the other planes' bits at random; 0.5 is a bf16 subnormal."""
    torch.manual_seed(plane)
    codes = torch.randint(0, 256, (1, 128, 64), dtype=torch.uint8)
    weight = Mxfp4Weight(codes=codes, scales=torch.full((1, 128, 4), 127, dtype=torch.uint8))
    words = cut_tiles(weight, identity_rows(128, torch.device("cpu"))).tiles[0, 0, 0]
    registers = words.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    found = run_ptx(getattr(kernel_tiles, f"MXFP4_ASM_{plane}").value, registers)
    tiny = _bf16_pair(found).flatten(-2)
    expected = naive.dequantize(weight)[0, :, 32 * plane : 32 * plane + 32].float()
    assert torch.equal(tiny.float() * 2.0**126, expected)
    assert set(expected.abs().flatten().tolist()) == {0, 0.5, 1, 1.5, 2, 3, 4, 6}
