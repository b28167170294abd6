"""An op's implementations as a test's parameters: in plain torch, and in Triton-language's interpreter."""

from importlib import import_module
from types import ModuleType

import pytest
import torch
from torch import Tensor

from support.interpreted import INTERPRETED

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 2**-8}
"""Some sums in float32 and one rounding to the type."""


def implementations(op: str, *, kernel: str = "kernel") -> pytest.MarkDecorator:
    """Give a test `ops`: the modules that implement an op of this name, one by one."""
    modules = {name: import_module(f"kimi_kernels.{op}.{name}") for name in ("plain", kernel)}
    plain, interpreted = (pytest.param(module, id=name) for name, module in modules.items())
    return pytest.mark.parametrize("ops", [plain, pytest.param(*interpreted.values, id="kernel", marks=INTERPRETED)])


def assert_rounded(ops: ModuleType, out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Raise unless out is what a judge expects, rounded to `dtype`."""
    assert out.dtype == dtype
    tolerance = ROUNDING[dtype]
    if dtype == torch.bfloat16 and "kernel" in ops.__name__:
        tolerance *= 4  # the interpreter rounds towards zero
    torch.testing.assert_close(out.double(), expected.double(), rtol=tolerance, atol=tolerance)
