"""The engine's side of a process that compiles: started when it is needed, and again when it has died."""

import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

from kimi_backend.grammar.compile_process import COMPILED, EXHAUSTED, Job, Setup
from kimi_backend.grammar.xgrammar_matcher import XgrammarVocabulary
from kimi_backend.types.grammar import Form


class NotCompiledError(Exception):
    """A form is no grammar, or takes more than it may; says why, and not which field of a request it was."""


class TooSlowError(NotCompiledError):
    """It takes longer than it may."""


class CompilingProcess:
    """One process. One thread at a time compiles; any may kill it."""

    def __init__(self, most_bytes: int, most_compiled_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._most_compiled_bytes = most_compiled_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[object, bytes] | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def compile(self, form: Form, vocabulary: XgrammarVocabulary, timeout_s: float, processor_s: float) -> str:
        """
        Args:
            processor_s: see `Job`.

        Returns:
            The grammar as it is sent.

        Raises:
            NotCompiledError: it is none, or takes more memory than it may; TooSlowError: more time.
        """
        self._start(vocabulary)
        assert self._pipe is not None
        try:
            self._pipe.send(Job(form, timeout_s, processor_s))
            reply = self._pipe.recv_bytes()
        except (EOFError, OSError):
            raise self._cause_of_death(timeout_s) from None
        if reply == EXHAUSTED:
            raise self._too_much_memory()
        if reply[:1] != COMPILED:
            raise NotCompiledError(reply[1:].decode("utf-8", "replace"))
        return reply[1:].decode()

    def kill(self) -> None:
        """End it; nothing starts it again."""
        with self._lock:
            self._is_closed = True
            process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def _start(self, vocabulary: XgrammarVocabulary) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        ours, theirs = socket.socketpair()
        command = [sys.executable or "python3", "-m", "kimi_backend.grammar.compile_process", str(theirs.fileno())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with self._lock, theirs:
            self._pipe = Connection(ours.detach())
            if self._is_closed:
                raise NotCompiledError("the server is shutting down")
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()], env=environment
            )
        num_threads = max(1, min(4, (os.cpu_count() or 1) // 2))
        self._pipe.send(
            Setup(str(vocabulary.info.serialize_json()), num_threads, self._most_bytes, self._most_compiled_bytes)
        )

    def _cause_of_death(self, timeout_s: float) -> NotCompiledError:
        assert self._process is not None
        status, self._process = self._process.wait(), None
        if status in (-signal.SIGALRM, -signal.SIGPROF):
            return TooSlowError(f"compiling it takes longer than the {timeout_s:g} s that are allowed")
        return self._too_much_memory()

    def _too_much_memory(self) -> NotCompiledError:
        return NotCompiledError(
            f"compiling it takes more than the {self._most_bytes // 2**20} MiB of memory that are allowed"
        )
