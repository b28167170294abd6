"""A process that compiles grammars and dies of those that take too much: python -m … DESCRIPTOR.

A schema of a few kB can keep the library busy for minutes, and nothing ends it but the process's end. So the kernel
ends it: timers bound the time of a grammar, a limit of address space its memory. What says of a keyword that it is
ignored comes on standard error, and counts as an error.

It is sent the tokenizer first, then one job after another, and answers each with a byte and a text.
"""

import os
import re
import resource
import signal
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import IO, Any

from kimi_backend.grammar.ebnf import ROOT, ebnf_of
from kimi_backend.grammar.library import GrammarCompiler, GrammarText, LibraryError, TokenizerInfo
from kimi_backend.types.grammar import Form

COMPILED, REFUSED, EXHAUSTED = b"+", b"-", b"!"
"""First byte of an answer: behind it the grammar, or why it is none; or it took more memory than it may."""
_WARNING = re.compile(rb"Warning: (.*)")
_WHERE = re.compile(r"^(\[[0-9:]+\] \S+:\d+: )+")
_PAGE = resource.getpagesize()


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message."""

    tokenizer: str
    """`TokenizerInfo.serialize_json`."""
    num_threads: int
    most_bytes: int
    """Memory that it may take, beyond what it has before the first job."""
    most_reply_bytes: int


@dataclass(frozen=True, slots=True)
class Job:
    form: Form
    timeout_s: float
    processor_s: float
    """Processor time of all its threads; 0 sets no limit."""


def main() -> None:
    """Serve until the other end is closed."""
    with Connection(int(sys.argv[1])) as pipe, tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        setup: Setup = pipe.recv()
        tokenizer = TokenizerInfo.deserialize_json(setup.tokenizer)
        compiler = GrammarCompiler(tokenizer, setup.num_threads, False, -1, False)
        most = _num_bytes_now() + setup.most_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        while True:
            try:
                job: Job = pipe.recv()
            except EOFError:
                return
            signal.setitimer(signal.ITIMER_REAL, job.timeout_s)
            signal.setitimer(signal.ITIMER_PROF, job.processor_s)
            reply = _compiled(compiler, job.form, said, setup.most_reply_bytes)
            for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
                signal.setitimer(timer, 0)
            pipe.send_bytes(reply)


def _compiled(compiler: Any, form: Form, said: IO[bytes], most_bytes: int) -> bytes:
    said.seek(0)
    said.truncate()
    try:
        grammar = GrammarText.from_ebnf(ebnf_of(form), ROOT)
        compiled = str(compiler.compile_grammar_ebnf(grammar).serialize_json())
    except (LibraryError, ValueError) as error:
        if "bad_alloc" in str(error):
            return EXHAUSTED
        return REFUSED + _WHERE.sub("", str(error)).strip().encode()
    said.seek(0)
    if warning := _WARNING.search(said.read()):
        return REFUSED + warning[1].strip()
    if len(compiled) > most_bytes:
        return REFUSED + f"too large: {len(compiled)} bytes compiled, at most {most_bytes} are allowed".encode()
    return COMPILED + compiled.encode()


def _num_bytes_now() -> int:
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[0]) * _PAGE


if __name__ == "__main__":
    main()
