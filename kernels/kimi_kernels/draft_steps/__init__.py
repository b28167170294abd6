"""Small ops between a verify and the draft step that follows it, of which no number passes the host."""

import importlib
from typing import Any

from kimi_kernels.kernel_set import KernelSet


def draft_step_ops(kernels: KernelSet) -> Any:
    """The module of `follow_verify` and `leave_tokens` that matches the set: on a CPU nothing may need
    Triton-language."""
    module = "kernel" if kernels.name == "triton" else "reference"
    return importlib.import_module(f"kimi_kernels.draft_steps.{module}")
