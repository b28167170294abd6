"""Compiling ahead: no kernel runs meanwhile, and none is compiled again afterwards."""

import pytest
import torch
import triton
import triton.language as tl

from kimi_kernels.kernel_compiling import compiling_only

pytestmark = pytest.mark.gpu


@triton.jit
def fill_kernel(out, VALUE: tl.constexpr):
    tl.store(out + tl.arange(0, 16), VALUE)


def test_kernels_are_compiled_and_do_not_run() -> None:
    out = torch.zeros(16, dtype=torch.int32, device="cuda")
    values = range(1, 9)
    with compiling_only():
        for value in values:
            fill_kernel[(1,)](out, VALUE=value)
    torch.cuda.synchronize()
    assert not out.any()
    cache = fill_kernel.device_caches[torch.cuda.current_device()][0]
    compiled = len(cache)
    assert compiled == len(values)
    for value in values:
        fill_kernel[(1,)](out, VALUE=value)
        assert (out == value).all()
    assert len(cache) == compiled


def test_an_error_ends_it() -> None:
    out = torch.zeros(16, dtype=torch.int32, device="cuda")
    with pytest.raises(RuntimeError, match="enough"), compiling_only():
        raise RuntimeError("enough")
    fill_kernel[(1,)](out, VALUE=3)
    assert (out == 3).all()
