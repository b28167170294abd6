"""A grammar for sequences whose text means nothing: a string that never ends, over a made-up vocabulary."""

import functools
import random
import string
from collections.abc import Mapping

from kimi_backend.grammar.compiler import GrammarCompiler
from kimi_backend.types.grammar import Ebnf, Grammar

GRAMMAR = Grammar(Ebnf('root ::= [^"\\\\\\x00-\\x1f]* "\\x01"'), "benchmark")
"""Bytes that may stand in a string of JSON. No token has the byte that would end it."""
_SPECIAL_SHARE = 0.05
"""The share of tokens with a quote, a backslash or a line's end in them, which no such text holds."""


class MadeUpTokenizer:
    """The part of a tokenizer that a compiler of grammars asks: pieces of words, those that no text holds last.

    Made-up acceptance puts the token before another in its place; it fits where that does.
    """

    control_tokens: Mapping[str, int] = {}

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = (vocab_size - 1,)
        draw = random.Random(1)
        num_special = int(_SPECIAL_SHARE * vocab_size)
        self._texts = [self._word(draw) for _ in range(vocab_size - 1 - num_special)]
        self._texts += [draw.choice((b'"', b'",', b"\\", b"\n")) + self._word(draw) for _ in range(num_special)]
        self._texts.append(b"")

    @staticmethod
    def _word(draw: random.Random) -> bytes:
        return (draw.choice(("", " ")) + "".join(draw.choices(string.ascii_letters, k=draw.randint(2, 9)))).encode()

    def token_bytes(self, token_id: int) -> bytes:
        return self._texts[token_id]


@functools.lru_cache(maxsize=1)
def compiler(vocab_size: int) -> GrammarCompiler:
    """One whose grammar is compiled already, so that nobody waits for it."""
    made = GrammarCompiler(MadeUpTokenizer(vocab_size))  # type: ignore[arg-type]
    made.request(GRAMMAR, vocab_size).result()
    return made
