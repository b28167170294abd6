"""The processes of the other ranks, as rank 0 starts, tells, watches and ends them."""

import atexit
import dataclasses
import gc
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ModelUnavailableError
from kimi_backend.parallel import TensorParallelGroup
from kimi_backend.runners.ranks.messages import (
    ANSWER,
    CLOSE,
    FAILED,
    READY,
    TIMEOUTS,
    Assignment,
    Pipe,
    Question,
    Step,
    WorkerError,
)
from kimi_backend.runners.ranks.process_group import join_ranks, leave
from kimi_backend.types.plan import DraftPlan, TargetPlan

_LOADING_GRACE_S = 2.0
"""The time that rank 0 gets to say itself what is wrong while models load: it is mostly wrong on every rank."""
_END_S = 10.0
_ENDING = threading.Lock()
"""Taken once and kept: a worker's death is noticed by its watch and by the step that failed, and told once."""


def end_process(problem: str) -> None:
    """This process is of no use without its workers, and a collective that one of them left never ends. Its server or
    its user starts it again."""
    _ENDING.acquire()
    sys.stderr.write(f"tensor parallel: {problem}; this process ends\n")
    sys.stderr.flush()
    os._exit(1)


class WorkerProcesses:
    """Ranks 1 to size - 1, for one process's runners (`workers.Workers`)."""

    def __init__(self, settings: ServingSettings, role: str, end: Callable[[str], None] = end_process) -> None:
        """Start them.

        Args:
            role: what they load, as `loading.Role` has it.
            end: called from another thread when one of them is gone unasked.
        """
        self._role, self._end = role, end
        self._size = settings.tensor_parallel_size
        self._listener = socket.create_server(("127.0.0.1", 0))  # held from now on, so that nobody takes the port
        self._address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._is_loading, self._is_on_cpu = True, True
        self._waits: list[tuple[int, int]] = []
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._group: TensorParallelGroup | None = None
        self._before_leaving: list[Callable[[], None]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watches: list[threading.Thread] = []
        self._pipes: list[Pipe] = []
        atexit.register(self._close_at_exit)
        try:
            for rank in range(1, self._size):
                self._pipes.append(self._start(rank, settings))
        except BaseException:
            self._closing.set()
            self._kill()
            raise

    @property
    def count(self) -> int:
        """See `Workers.count`."""
        return len(self._pipes)

    @property
    def process_ids(self) -> list[int]:
        """Process ids in the order of their ranks."""
        return [process.pid for process in self._processes]

    def join(self, device: torch.device) -> TensorParallelGroup:
        """Meet them, as rank 0 on this device."""
        self._is_on_cpu = device.type == "cpu"
        self._group = join_ranks(0, self._size, self._address, device, listener=self._listener, **TIMEOUTS)
        return self._group

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Around loading this rank's models: what is wrong ends the others at once, and is raised."""
        try:
            yield
            self._wait_until_ready()
            self._is_loading = False
        except BaseException:
            self._closing.set()
            self._kill()
            if self._is_on_cpu:  # on a GPU leaving would wait for them
                self._leave()
            raise

    def run(self, plan: TargetPlan | DraftPlan, aux: torch.Tensor | None = None) -> AbstractContextManager[None]:
        """See `Workers.run`."""
        waits, self._waits = tuple(self._waits), []
        return _Running(self, pickle.dumps(Step(plan, aux, waits).packed(), protocol=5))

    def wait_before_next(self, semaphore: int, value: int) -> None:
        """See `Workers.wait_before_next`."""
        self._waits.append((semaphore, value))

    def tell(self, message: bytes) -> None:
        """Send a packed step to all."""
        if self._closing.is_set():
            raise ModelUnavailableError("the other ranks have ended")
        try:
            with self._lock:
                for pipe in self._pipes:
                    pipe.send_bytes(message)
        except OSError as error:
            self.fail(f"a rank of the {self._role} takes no step: {error}")

    def fail(self, problem: str) -> None:
        """A step will not come to its end on every rank."""
        if not self._closing.is_set():
            self._end(problem)

    def ask(self, question: str, contents: list[bytes]) -> list[bytes]:
        """See `Workers.ask`."""
        self._waits = []  # of a step that did not come to run; the semaphores may be others from now on
        with self._lock:
            for rank, (pipe, content) in enumerate(zip(self._pipes, contents, strict=True), 1):
                try:
                    pipe.send(Question(question, content).packed())
                except OSError as error:
                    raise WorkerError(f"rank {rank} of the {self._role} has ended: {error}") from None
            return self._answers()

    def before_leaving(self, drop: Callable[[], None]) -> None:
        """drop: lets go of captured steps, which hold the collectives that they call."""
        self._before_leaving.append(drop)

    def close(self) -> None:
        """See `Workers.close`."""
        self._close(self._leave_in_time)

    def _close_at_exit(self) -> None:
        self._close(self._leave)  # an interpreter that ends starts no thread

    def _close(self, leave_group: Callable[[], None]) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(CLOSE)
        leave_group()
        deadline = time.monotonic() + _END_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self, rank: int, settings: ServingSettings) -> Pipe:
        ours, theirs = socket.socketpair()
        pipe: Pipe = Connection(ours.detach())
        started, problems = threading.Event(), list[OSError]()

        def start_and_watch() -> None:
            # The worker is killed when the thread that started it ends: so this one stays.
            command = [sys.executable or "python3", "-m", "kimi_backend.rank_worker.worker", str(theirs.fileno())]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment, stdout=2
                )
            except OSError as error:
                problems.append(error)
            else:
                self._processes.append(process)
            theirs.close()
            started.set()
            if problems:
                return
            self._report_end(rank, process.wait())

        watch = threading.Thread(target=start_and_watch, name=f"kimi-rank-{rank}", daemon=True)
        watch.start()
        self._watches.append(watch)
        if not started.wait(_END_S) or problems:
            reason = f": {problems[0]}" if problems else ""
            raise WorkerError(f"rank {rank} of the {self._role}: its process did not start{reason}")
        pipe.send(
            Assignment(
                parent_pid=os.getpid(),
                rank=rank,
                size=self._size,
                address=self._address,
                role=self._role,
                settings=dataclasses.asdict(settings),
            ).packed()
        )
        return pipe

    def _report_end(self, rank: int, code: int) -> None:
        if self._closing.wait(_LOADING_GRACE_S if self._is_loading else 0.0):
            return
        how = f"was killed by signal {-code}" if code < 0 else f"has ended with code {code}"
        self._end(f"rank {rank} of the {self._role} {how}")

    def _wait_until_ready(self) -> None:
        for rank, pipe in enumerate(self._pipes, 1):
            kind, content = _received(pipe)
            if kind != READY:  # those behind it may wait for it, and say no more
                raise WorkerError(f"rank {rank} of the {self._role}: {content}")

    def _answers(self) -> list[bytes]:
        """Read the answers of all ranks: none is left for the next question to find."""
        received = [_received(pipe) for pipe in self._pipes]
        problems = [
            f"rank {rank} of the {self._role}: {content}"
            for rank, (kind, content) in enumerate(received, 1)
            if kind != ANSWER
        ]
        if problems:
            raise WorkerError("; ".join(problems))
        return [content for _, content in received]

    def _leave_in_time(self) -> None:
        """Leave the group, without waiting for a rank that is stuck and will not come."""
        thread = threading.Thread(target=self._leave, name="kimi-leave", daemon=True)
        thread.start()
        thread.join(_END_S)

    def _leave(self) -> None:
        """All ranks do it at the same time."""
        group, self._group = self._group, None
        for drop in self._before_leaving:
            drop()
        if not self._is_on_cpu:
            torch.cuda.synchronize()  # a step that nobody waited for may still run
        if group is not None:
            _collect_captures()
            leave(group)

    def _kill(self) -> None:
        atexit.unregister(self._close_at_exit)
        for process in self._processes:
            process.kill()
        for watch in self._watches:
            watch.join(_END_S)
        for pipe in self._pipes:
            pipe.close()
        self._listener.close()


class _Running:
    """A step that all ranks run."""

    __slots__ = ("_message", "_workers")

    def __init__(self, workers: WorkerProcesses, message: bytes) -> None:
        self._workers, self._message = workers, message

    def __enter__(self) -> None:
        self._workers.tell(self._message)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._workers.fail(f"a step has failed on rank 0: {kind.__name__ if kind else ''}: {error}")


def _received(pipe: Pipe) -> tuple[str, Any]:
    try:
        kind, content = pipe.recv()
    except (EOFError, OSError) as error:
        return FAILED, f"has ended: {error}"
    return kind, content


def _collect_captures() -> None:
    """Captured steps that were dropped are in cycles, which may be frozen (`kimi_backend.processes`): free them now."""
    gc.unfreeze()
    gc.collect()
