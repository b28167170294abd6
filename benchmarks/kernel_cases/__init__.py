"""The protocol of a kernel benchmark: one module an op, each with a function `cases(kernels) -> list[Case]`.

`benchmarks/kernels.py` imports every module beside this file, prepares a case, checks it, captures all its calls in one
CUDA graph, replays the graph and divides. So a case says only what must be moved and multiplied, how to set inputs up
and how to judge the result.

    def cases(kernels: KernelSet) -> list[Case]:
        return [Case(op="silu_mul", name="64 rows", num_bytes=..., num_flops=0, prepare=lambda: prepare(kernels, 64))]
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

ROTATED_BYTES = 420 << 20
"""Inputs of successive calls cover at least this many bytes: eight times the L2 cache of an H100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The two rates that the card reached in this very run, from which every floor is computed."""

    read_bytes_per_us: float
    matmul_flops_per_us: float
    """bf16, 8192 x 8192 x 8192, random data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A case with its tensors on the device."""

    calls: list[Callable[[], object]]
    """One call an input set; together they read at least `ROTATED_BYTES`. Every one must be capturable."""
    check: Callable[[], float]
    """Runs the op on fresh or on these inputs, compares with a float32 reference and returns the relative error.
    Raises AssertionError when it is too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    op: str
    name: str
    num_bytes: float
    """Fewest bytes through device memory: each input read once, each output written once."""
    num_flops: float
    """Fewest floating-point operations on the tensor cores, 2 a multiply-add."""
    prepare: Callable[[], Prepared]
    flop_rate: float = 1.0
    """Rate of the tensor cores in this op's arithmetic, as a multiple of bf16's (2.0 for fp8)."""
    limit_us: float | None = None
    """The op must not take longer (issue's "must"); None: no promise."""
    limit_of_floor: float | None = None
    """The op must not take longer than this many floors; None: no promise."""
    peer: str = ""
    """Best public kernel on the same kind of card: name and microseconds."""

    def floor_us(self, ceilings: Ceilings) -> float:
        """The larger of the time to move the bytes and the time to do the arithmetic."""
        return max(
            self.num_bytes / ceilings.read_bytes_per_us,
            self.num_flops / (self.flop_rate * ceilings.matmul_flops_per_us),
        )

    def limited_by(self, ceilings: Ceilings) -> str:
        """'memory' or 'compute': which of the two times is larger."""
        by_bytes = self.num_bytes / ceilings.read_bytes_per_us
        return "memory" if by_bytes * self.flop_rate * ceilings.matmul_flops_per_us >= self.num_flops else "compute"


def num_input_sets(bytes_per_call: float, *, at_least: int = 2, at_most: int = 512) -> int:
    """The number of input sets that a case needs so that its calls read `ROTATED_BYTES` before they repeat."""
    return max(at_least, min(at_most, math.ceil(ROTATED_BYTES / max(1.0, bytes_per_call))))


def relative_error(out: torch.Tensor, expected: torch.Tensor, limit: float) -> float:
    """norm(out - expected) / norm(expected) in float64.

    Raises:
        AssertionError: it is above `limit`, or not a number.
    """
    difference = torch.linalg.vector_norm(out.double() - expected.double())
    error = float(difference / torch.linalg.vector_norm(expected.double()).clamp_min(1e-30))
    if not error <= limit:
        raise AssertionError(f"relative error {error:.3g} is above {limit:.3g}")
    return error
