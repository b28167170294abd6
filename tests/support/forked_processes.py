"""Processes that begin with torch and the runners imported, which takes each of them 2 s otherwise."""

import os
import subprocess
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing as mp

from kimi_backend.rank_worker import worker

PRELOADED = ["kimi_backend.rank_worker.worker"]


def run_ranks(run: Callable[..., None], size: int, *args: Any) -> None:
    """Call `run(rank, *args)` in a process a rank; raises what any of them raises."""
    _forking()
    mp.start_processes(run, args=args, nprocs=size, start_method="forkserver")


def start_forked(run: Callable[..., None], *args: Any) -> mp.Process:
    """A process that calls `run(*args)`."""
    process = _forking().Process(target=run, args=args)
    process.start()
    return process


class ForkedWorker:
    """Stands in for the `subprocess.Popen` by which `WorkerProcesses` starts a rank: the same program, forked. Its
    parent is not the process that asked for it, so that it does not end with that one."""

    def __init__(self, command: list[str], *, pass_fds: list[int], **options: Any) -> None:
        with Connection(os.dup(pass_fds[0])) as pipe:
            self._process = start_forked(_run_worker, pipe)
        self._lock = threading.Lock()
        self.pid = self._process.pid

    def wait(self, timeout: float = 600.0) -> int:
        """Does what `subprocess.Popen.wait` does, from several threads."""
        ends_at = time.monotonic() + timeout
        while True:
            with self._lock:
                code = self._process.exitcode
            if code is not None:
                return code
            if time.monotonic() > ends_at:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.01)

    def kill(self) -> None:
        with self._lock:
            self._process.kill()


def _run_worker(pipe: Connection) -> None:
    worker.end_with_starter = lambda parent_pid: None
    worker.main([str(pipe.fileno())])


def _forking() -> Any:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
