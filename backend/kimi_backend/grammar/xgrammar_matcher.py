"""`Matcher` by xgrammar."""

from typing import Any

import numpy as np

from kimi_backend.grammar.library import RAW_VOCABULARY, CompiledGrammar, GrammarMatcher, TokenizerInfo
from kimi_backend.types.plan import Int32Array

_NOT_AFTER = {0xE0: range(0x80, 0xA0), 0xED: range(0xA0, 0xC0), 0xF0: range(0x80, 0x90), 0xF4: range(0x90, 0xC0)}
"""First byte of a character of UTF-8 -> second bytes that would make it none: overlong, a surrogate, beyond the last.
The library lets them come where a pattern allows any character."""


MOST_WORDS = 16
"""Words of a mask in which the tokens that one text may begin with lie; in more lie those of several texts."""

NO_TEXT = b"\xff"
"""Begins what stands for a control token that a grammar may name: the library takes one without bytes for a special
token, which it never accepts, and no text of a grammar has this byte."""


class XgrammarVocabulary:
    """A tokenizer's tokens as the library knows them; the control tokens are nobody's text."""

    def __init__(self, token_bytes: list[bytes], vocab_size: int, stop_token_ids: list[int]) -> None:
        """
        Args:
            token_bytes: of each token; empty for an id without a token and for a control token, but for those that
                grammars name (NO_TEXT).
            vocab_size: the model's; tokens from there on are left out.
            stop_token_ids: those that end a reply, and may come where a grammar is at an end.
        """
        self.info: Any = TokenizerInfo(token_bytes[:vocab_size], RAW_VOCABULARY, vocab_size, stop_token_ids, False)
        self.num_words = -(-vocab_size // 32)
        self.token_bytes = token_bytes
        self.last_byte = [text[-1] if text else 0 for text in token_bytes[:vocab_size]]
        self.text_mask = _packed(
            np.array([bool(text) and not text.startswith(NO_TEXT) for text in token_bytes[:vocab_size]]), self.num_words
        )
        first = np.array([text[0] if text else 0 for text in token_bytes[:vocab_size]])
        self.allowed_after = {
            lead: _packed(~np.isin(first, list(wrong)), self.num_words) for lead, wrong in _NOT_AFTER.items()
        }

    def compiled(self, packed: str) -> "XgrammarGrammar":
        """A grammar from what the process that compiles has sent."""
        return XgrammarGrammar(self, CompiledGrammar.deserialize_json(packed, self.info))


class XgrammarGrammar:
    """`matcher.CompiledGrammar`."""

    def __init__(self, vocabulary: XgrammarVocabulary, compiled: Any) -> None:
        self._vocabulary, self._compiled = vocabulary, compiled

    @property
    def text_mask(self) -> Int32Array:
        """See `CompiledGrammar.text_mask`."""
        return self._vocabulary.text_mask

    def matcher(self) -> "XgrammarMatcher":
        """See `CompiledGrammar.matcher`."""
        return XgrammarMatcher(self._vocabulary, GrammarMatcher(self._compiled, None, False, -1, None))


class XgrammarMatcher:
    """See `Matcher`."""

    def __init__(self, vocabulary: XgrammarVocabulary, matcher: Any) -> None:
        self._vocabulary, self._matcher = vocabulary, matcher
        self._last_bytes = bytearray(1)

    def fill(self, words: Int32Array) -> None:
        """See `Matcher.fill`."""
        self._matcher.fill_next_token_bitmask(words.reshape(1, -1), 0, False)
        allowed = self._vocabulary.allowed_after.get(self._last_bytes[-1])
        if allowed is not None:
            words &= allowed

    def accept(self, token_id: int) -> bool:
        """See `Matcher.accept`."""
        if not self._matcher.accept_token(token_id, False):
            return False
        self._last_bytes.append(self._vocabulary.last_byte[token_id])
        return True

    def rollback(self, num_tokens: int) -> None:
        """See `Matcher.rollback`."""
        if num_tokens:
            self._matcher.rollback(num_tokens)
            del self._last_bytes[-num_tokens:]

    def forced(self, words: Int32Array) -> int | None:
        """See `Matcher.forced`. By the mask: the library follows a text to its end, and some have none."""
        places = np.flatnonzero(words)
        if len(places) > MOST_WORDS:
            return None
        bits = np.unpackbits(words[places].view(np.uint8), bitorder="little").reshape(len(places), 32)
        allowed: list[int] = [32 * int(places[row]) + column for row, column in np.argwhere(bits).tolist()]
        if len(allowed) == 1:
            return allowed[0]
        texts = self._vocabulary.token_bytes
        longest = max(allowed, key=lambda token_id: len(texts[token_id]), default=None)
        if longest is None or not all(
            texts[token_id] and texts[longest].startswith(texts[token_id]) for token_id in allowed
        ):
            return None
        return longest


def _packed(allowed: Any, num_words: int) -> Int32Array:
    bits = np.zeros(num_words * 32, np.uint8)
    bits[: len(allowed)] = allowed
    words: Int32Array = np.packbits(bits, bitorder="little").view(np.int32)
    return words
