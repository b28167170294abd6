"""A kernel that lets time pass."""

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from kimi_kernels.dependent_launch import pdl_options


@triton.jit(do_not_specialize=["nanoseconds"])
def pause_kernel(nanoseconds, PDL: tl.constexpr):
    """Ends that long after the kernel before it."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    start = globaltimer()
    while globaltimer() - start < nanoseconds:
        pass


def pausing(microseconds: float, device: torch.device) -> Callable[[], None]:
    """Runs `pause_kernel`; nothing for 0."""
    return partial(_pause, round(1e3 * microseconds), device)


def _pause(nanoseconds: int, device: torch.device) -> None:
    if nanoseconds > 0:
        pause_kernel[(1,)](nanoseconds, num_warps=1, **pdl_options(device))
