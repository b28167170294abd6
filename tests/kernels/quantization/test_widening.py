"""The bit tricks of mxfp4, which only a GPU runs: their PTX carried out here on every code."""

import re

import pytest
import torch
from torch import Tensor

from kimi_kernels.quantization import kernel_tiles
from kimi_kernels.quantization.mxfp4 import dequantize_mxfp4
from kimi_kernels.quantization.tiles import cut_tiles, identity_rows
from kimi_kernels.weights import Mxfp4Weight

INSTRUCTION = re.compile(r"(and|shl|shr|mul\.lo|lop3)\.[bu]32 ([^;]+);")
A_AND_B_OR_C = "0xea"


def run_ptx(assembly: str, words: Tensor) -> Tensor:
    """`$0` of the instructions where `$1` is `words`: int64, 32 bits each."""
    registers = {"$1": words}

    def value(operand: str) -> Tensor:
        return registers[operand] if operand in registers else torch.tensor(int(operand, 0))

    for name, operands in INSTRUCTION.findall(assembly):
        target, *sources = operands.split(", ")
        a, b = value(sources[0]), value(sources[1])
        if name == "lop3":
            assert sources[3] == A_AND_B_OR_C, "the one truth table in use"
            registers[target] = a & b | value(sources[2])
        else:
            result = {"and": a & b, "shl": a << b, "shr": a >> b, "mul.lo": a * b}[name]
            registers[target] = result & 0xFFFFFFFF
    return registers["$0"]


@pytest.mark.parametrize("plane", range(4))
def test_mxfp4_codes_become_bf16(plane: int) -> None:
    """Two words a register, the other planes' bits at random; 0.5 is a bf16 subnormal."""
    torch.manual_seed(plane)
    codes = torch.randint(0, 256, (1, 128, 64), dtype=torch.uint8)
    weight = Mxfp4Weight(codes=codes, scales=torch.full((1, 128, 4), 127, dtype=torch.uint8))
    words = cut_tiles(weight, identity_rows(128, torch.device("cpu"))).tiles[0, 0, 0]
    registers = words.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    found = run_ptx(getattr(kernel_tiles, f"MXFP4_ASM_{plane}").value, registers)
    tiny = torch.stack([found & 0xFFFF, found >> 16], dim=-1).flatten(-2).to(torch.int16).view(torch.bfloat16)
    expected = dequantize_mxfp4(weight)[0, :, 32 * plane : 32 * plane + 32]
    assert torch.equal(tiny.float() * 2.0**126, expected)
    assert set(expected.abs().flatten().tolist()) == {0, 0.5, 1, 1.5, 2, 3, 4, 6}
