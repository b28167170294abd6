"""`GrammarSource` by xgrammar: a cache, and processes that compile what is not in it."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from kimi_backend.errors import InvalidRequestError
from kimi_backend.grammar.compile_process import COMPILED, EXHAUSTED, Job, Setup
from kimi_backend.grammar.matcher import CompiledGrammar
from kimi_backend.grammar.xgrammar_matcher import NO_TEXT, XgrammarVocabulary
from kimi_backend.text.tokenizer import Tokenizer
from kimi_backend.types.grammar import Form, Grammar, call_token_ids

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileLimits:
    """Limits of what grammars may take."""

    timeout_s: float = 10.0
    """The time of one, from the moment that it is compiled; those before it are waited for."""
    most_bytes: int = 2048 * MIB
    """Memory of one while it is compiled."""
    most_compiled_bytes: int = 32 * MIB
    """The size of one, compiled, as it is sent."""
    most_cached_bytes: int = 256 * MIB
    """The size of all that are kept, counted likewise."""
    num_processes: int = 2


class GrammarCompiler:
    """See `GrammarSource`. What is compiled is kept, the least used ones go; nothing starts before it is needed."""

    def __init__(self, tokenizer: Tokenizer, limits: CompileLimits | None = None) -> None:
        self._tokenizer = tokenizer
        self._limits = limits or CompileLimits()
        self._lock = threading.Lock()
        self._vocabulary: XgrammarVocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._compiled: OrderedDict[Form, tuple[CompiledGrammar, int]] = OrderedDict()
        self._num_cached_bytes = 0
        self._under_way: dict[Form, Future[CompiledGrammar]] = {}
        self._pool = ThreadPoolExecutor(self._limits.num_processes, "kimi-grammar")
        self._processes = [_CompileProcess() for _ in range(self._limits.num_processes)]
        self._idle = list(self._processes)

    def request(self, grammar: Grammar, vocab_size: int) -> "Future[CompiledGrammar]":
        """See `GrammarSource.request`."""
        form = grammar.form
        with self._lock:
            if form in self._compiled:
                self._compiled.move_to_end(form)
                done: Future[CompiledGrammar] = Future()
                done.set_result(self._compiled[form][0])
                return done
            if form not in self._under_way:
                self._under_way[form] = self._pool.submit(self._compile, grammar, vocab_size)
            return self._under_way[form]

    def close(self) -> None:
        """See `GrammarSource.close`."""
        for process in self._processes:
            process.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.kill()

    def _compile(self, grammar: Grammar, vocab_size: int) -> CompiledGrammar:
        try:
            with self._lock:
                process = self._idle.pop()
            try:
                vocabulary = self._vocabulary_of(vocab_size)
                packed = process.compile(grammar, vocabulary, self._limits)
            finally:
                with self._lock:
                    self._idle.append(process)
            compiled = vocabulary.compiled(packed)
            with self._lock:
                self._keep(grammar.form, compiled, len(packed))
            return compiled
        finally:
            with self._lock:
                del self._under_way[grammar.form]

    def _keep(self, form: Form, compiled: CompiledGrammar, num_bytes: int) -> None:
        self._compiled[form] = (compiled, num_bytes)
        self._num_cached_bytes += num_bytes
        while self._num_cached_bytes > self._limits.most_cached_bytes and len(self._compiled) > 1:
            self._num_cached_bytes -= self._compiled.popitem(last=False)[1][1]

    def _vocabulary_of(self, vocab_size: int) -> XgrammarVocabulary:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                tokenizer = self._tokenizer
                controls = frozenset(tokenizer.control_tokens.values())
                num_tokens = min(tokenizer.vocab_size, vocab_size)
                texts = [b"" if i in controls else tokenizer.token_bytes(i) for i in range(num_tokens)]
                for token_id in call_token_ids(tokenizer.control_tokens):
                    texts[token_id] = NO_TEXT + str(token_id).encode()
                self._vocabulary = XgrammarVocabulary(texts, vocab_size, list(tokenizer.eos_token_ids))
            return self._vocabulary


@dataclass(slots=True)
class _CompileProcess:
    """A process that compiles, started when it is needed and again when it has died. One thread at a time compiles."""

    _process: "subprocess.Popen[bytes] | None" = None
    _pipe: "Connection[object, bytes] | None" = None
    _is_closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def compile(self, grammar: Grammar, vocabulary: XgrammarVocabulary, limits: CompileLimits) -> str:
        """
        Returns:
            The grammar as it is sent.

        Raises:
            InvalidRequestError: it is none, or takes more than it may.
        """
        self._start(vocabulary, limits)
        assert self._pipe is not None
        try:
            self._pipe.send(Job(grammar.form, limits.timeout_s))
            reply = self._pipe.recv_bytes()
        except (EOFError, OSError):
            raise InvalidRequestError(f"{grammar.field}: {self._cause_of_death(limits)}") from None
        if reply == EXHAUSTED:
            raise InvalidRequestError(f"{grammar.field}: {_too_much_memory(limits)}")
        if reply[:1] != COMPILED:
            raise InvalidRequestError(f"{grammar.field}: {reply[1:].decode('utf-8', 'replace')}")
        return reply[1:].decode()

    def kill(self) -> None:
        """End it; nothing starts it again."""
        with self._lock:
            self._is_closed = True
            process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def _start(self, vocabulary: XgrammarVocabulary, limits: CompileLimits) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        ours, theirs = socket.socketpair()
        command = [sys.executable or "python3", "-m", "kimi_backend.grammar.compile_process", str(theirs.fileno())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with self._lock, theirs:
            self._pipe = Connection(ours.detach())
            if self._is_closed:
                raise InvalidRequestError("the server is shutting down")
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()], env=environment
            )
        num_threads = max(1, min(4, (os.cpu_count() or 1) // 2))
        self._pipe.send(
            Setup(str(vocabulary.info.serialize_json()), num_threads, limits.most_bytes, limits.most_compiled_bytes)
        )

    def _cause_of_death(self, limits: CompileLimits) -> str:
        assert self._process is not None
        status, self._process = self._process.wait(), None
        if status == -signal.SIGALRM:
            return f"compiling it takes longer than the {limits.timeout_s:g} s that are allowed"
        return _too_much_memory(limits)


def _too_much_memory(limits: CompileLimits) -> str:
    return f"compiling it takes more than the {limits.most_bytes // MIB} MiB of memory that are allowed"
