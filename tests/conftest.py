"""Shared by every test: one thread a process, so that workers do not fight over cores and results repeat."""

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Triton-language decides at decoration, that is when a kernel's module is first imported, whether its interpreter
    # runs it. So this stands before every import of one, for all tests of a process. Tests that compile for real
    # (test_compile_gate.py) do it in a process of their own.
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(1)

# A busy machine makes a slow example, not a wrong one.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
