"""Processes that begin with torch and the runners imported, which takes each of them 2 s otherwise."""

from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

PRELOADED = ["kimi_backend.runners.load.loading"]


def run_ranks(run: Callable[..., None], size: int, *args: Any) -> None:
    """Call `run(rank, *args)` in a process a rank; raises what any of them raises."""
    _forking()
    mp.start_processes(run, args=args, nprocs=size, start_method="forkserver")


def start_forked(run: Callable[..., None], *args: Any) -> mp.Process:
    """A process that calls `run(*args)`."""
    process = _forking().Process(target=run, args=args)
    process.start()
    return process


def _forking() -> Any:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
