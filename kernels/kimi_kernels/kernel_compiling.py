"""Compiling many Triton-language kernels at once, ahead of their first launch."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.jit import JITFunction

MOST_THREADS = 32


@contextmanager
def compiling_only() -> Iterator[None]:
    """Within, a launch of a kernel only compiles it, on another thread, and runs nothing; at the end all are compiled.

    A kernel that does not compile fails at its first launch afterwards. What kernels would have written is left as it
    was, so code within may compute with anything, but must not use it as an index. One thread at a time.
    """
    launch = JITFunction.run

    def compile_in_place_of_launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_in_place_of_launch
    try:
        with (
            ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads,
            triton.AsyncCompileMode(threads, ignore_errors=True),
        ):
            yield
    finally:
        JITFunction.run = launch
