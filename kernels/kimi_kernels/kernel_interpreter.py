"""Launches' questions about the device; Triton-language's interpreter answers them in tests on a CPU."""

import functools

import torch
import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
INTERPRETER_PROCESSORS = 5
"""Multiprocessors of a CPU: few, so that tests cut sequences in the middle."""


@functools.lru_cache(maxsize=16)
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type != "cuda":
        return INTERPRETER_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def math_dtype(dtype: torch.dtype, *, reads_float8: bool = False) -> tl.dtype:
    """The operands' dtype of products with rows of `dtype`; the interpreter cannot multiply bf16.

    Args:
        reads_float8: the other operand is float8, which float16 holds exactly.
    """
    if dtype == torch.float32 or (INTERPRETED and dtype == torch.bfloat16):
        return tl.float32
    return tl.float16 if reads_float8 or dtype == torch.float16 else tl.bfloat16
