"""`GrammarSource` by xgrammar: a cache, and processes that compile what is not in it."""

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from kimi_backend.errors import CapacityError, InvalidRequestError
from kimi_backend.grammar.compiling_process import CompilingProcess, NotCompiledError, TooSlowError
from kimi_backend.grammar.matcher import CompiledGrammar
from kimi_backend.grammar.xgrammar_matcher import NO_TEXT, XgrammarVocabulary
from kimi_backend.processes import LARGE_BYTES, give_freed_memory_back
from kimi_backend.text.tokenizer import Tokenizer
from kimi_backend.types.grammar import Form, Grammar, call_token_ids

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileLimits:
    """Limits of what grammars may take."""

    first_try_s: float = 1.0
    """Processor time of one at first: what takes longer makes room, and begins anew where only such are compiled."""
    timeout_s: float = 10.0
    """The time of one, from the moment that it is compiled; those before it are waited for."""
    most_bytes: int = 2048 * MIB
    """Memory of one while it is compiled."""
    most_compiled_bytes: int = 32 * MIB
    """The size of one, compiled, as it is sent."""
    most_cached_bytes: int = 256 * MIB
    """The size of all that are kept, counted likewise."""
    num_processes: int = 2
    """The processes of first tries; second ones share another."""


@dataclass(slots=True)
class _Job:
    form: Form
    vocab_size: int
    waiting: list[tuple[str, Future[CompiledGrammar]]] = field(default_factory=list)
    """The field of each request that wants it, and what tells that request."""

    @property
    def is_wanted(self) -> bool:
        return not all(future.cancelled() for _, future in self.waiting)


class GrammarCompiler:
    """See `GrammarSource`. What is compiled is kept, the least used ones go; nothing starts before it is needed."""

    def __init__(self, tokenizer: Tokenizer, limits: CompileLimits | None = None) -> None:
        self._tokenizer = tokenizer
        self._limits = limits = limits or CompileLimits()
        self._lock = threading.Lock()
        self._vocabulary: XgrammarVocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._compiled: OrderedDict[Form, tuple[CompiledGrammar, int]] = OrderedDict()
        self._num_cached_bytes = 0
        self._under_way: dict[Form, _Job] = {}
        self._is_closed = False
        self._first_tries = _Lane("kimi-grammar", limits.num_processes, limits.first_try_s, limits)
        self._second_tries = _Lane("kimi-slow-grammar", 1, 0, limits)

    def request(self, grammar: Grammar, vocab_size: int) -> "Future[CompiledGrammar]":
        """See `GrammarSource.request`."""
        form, asked = grammar.form, Future[CompiledGrammar]()
        with self._lock:
            if self._is_closed:
                raise CapacityError("the server is shutting down and compiles no more grammars; send it again")
            if form in self._compiled:
                self._compiled.move_to_end(form)
                asked.set_result(self._compiled[form][0])
                return asked
            job = self._under_way.get(form)
            if job is None:
                job = self._under_way[form] = _Job(form, vocab_size)
                self._first_tries.pool.submit(self._compile, job, self._first_tries)
            job.waiting.append((grammar.field, asked))
            return asked

    def close(self) -> None:
        """See `GrammarSource.close`."""
        with self._lock:
            self._is_closed = True
        lanes = (self._first_tries, self._second_tries)  # in this order: first tries hand on to second ones
        for lane in lanes:
            lane.kill()
        for lane in lanes:
            lane.pool.shutdown(wait=True, cancel_futures=True)
        for job in list(self._under_way.values()):
            self._settle(job, NotCompiledError("the server is shutting down"))

    def _compile(self, job: _Job, lane: "_Lane") -> None:
        """A job's turn; what nobody waits for any more takes none."""
        with self._lock:
            if not job.is_wanted:
                del self._under_way[job.form]
                return
        try:
            vocabulary = self._vocabulary_of(job.vocab_size)
            packed = lane.compile(job.form, vocabulary)
            compiled = vocabulary.compiled(packed)
            if len(packed) > LARGE_BYTES:
                give_freed_memory_back()  # reading it took ten times as much
        except TooSlowError as error:
            if lane is self._first_tries:
                self._second_tries.pool.submit(self._compile, job, self._second_tries)
            else:
                self._settle(job, error)
        except Exception as error:
            self._settle(job, error)
        else:
            self._settle(job, compiled, len(packed))

    def _settle(self, job: _Job, outcome: CompiledGrammar | Exception, num_bytes: int = 0) -> None:
        """Tell all who wait. Afterwards the form is compiled already, or is asked for anew."""
        with self._lock:
            del self._under_way[job.form]
            if not isinstance(outcome, Exception):
                self._keep(job.form, outcome, num_bytes)
        for name, future in job.waiting:
            if not future.set_running_or_notify_cancel():
                continue
            if isinstance(outcome, NotCompiledError):
                future.set_exception(InvalidRequestError(f"{name}: {outcome}"))
            elif isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

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


class _Lane:
    """Processes that compile jobs in the order of their coming, each for so long."""

    def __init__(self, name: str, num_processes: int, processor_s: float, limits: CompileLimits) -> None:
        self.pool = ThreadPoolExecutor(num_processes, name)
        self._times_s = (limits.timeout_s, processor_s)
        bounds = (limits.most_bytes, limits.most_compiled_bytes)
        self._processes = [CompilingProcess(*bounds) for _ in range(num_processes)]
        self._idle = list(self._processes)

    def compile(self, form: Form, vocabulary: XgrammarVocabulary) -> str:
        """See `CompilingProcess.compile`. On a thread of the pool, of which there are as many as processes."""
        process = self._idle.pop()
        try:
            return process.compile(form, vocabulary, *self._times_s)
        finally:
            self._idle.append(process)

    def kill(self) -> None:
        """End the processes; nothing starts them again."""
        for process in self._processes:
            process.kill()
