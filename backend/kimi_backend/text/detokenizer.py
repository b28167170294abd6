"""Token ids to text as they arrive, for one request.

Whatever the cut of the ids into pushes: the deltas joined, `finish` included, are the full decode; no delta ends inside
a UTF-8 character; none holds a U+FFFD that the full decode lacks. Work per token does not grow with the text.
"""

import codecs
from collections.abc import Iterable
from typing import Protocol

from kimi_backend.text.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer(Protocol):
    """Text of a growing list of tokens."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; bytes of a character that is still open wait."""
        ...

    def push_each(self, token_ids: Iterable[int]) -> list[str]:
        """Do what `push` does, with one text for each token: joined they are what `push` would return."""
        ...

    def finish(self) -> str:
        """The rest: what waited, as U+FFFD where it never became a character. Call once, push nothing after."""
        ...


def make_detokenizer(tokenizer: Tokenizer, skip_special: bool = True) -> IncrementalDetokenizer:
    """A detokenizer for one request.

    Args:
        skip_special: leave special tokens out of the text, as `Tokenizer.decode` does with the same flag.
    """
    if tokenizer.is_byte_level:
        return ByteLevelDetokenizer(tokenizer, skip_special)
    return WindowDetokenizer(tokenizer, skip_special)


class ByteLevelDetokenizer:
    """An incremental UTF-8 decoder, for tokenizers whose decode is the concatenation of token bytes."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_token_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        data = b"".join(self._token_bytes(token_id) for token_id in token_ids if token_id not in self._skipped)
        return self._decoder.decode(data)

    def push_each(self, token_ids: Iterable[int]) -> list[str]:
        token_bytes, skipped, decode = self._token_bytes, self._skipped, self._decoder.decode
        return [decode(token_bytes(token_id)) if token_id not in skipped else "" for token_id in token_ids]

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Decodes a short window twice and emits the difference, for tokenizers whose decode looks at neighbours
    (WordPiece …).

    The window is the tokens of the last emitted piece and those after it. `finish` decodes everything once and emits
    what is missing, so the joined deltas are the full decode whenever the decode of a prefix is a prefix of the decode.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special else frozenset()
        self._token_ids: list[int] = []
        self._window_start = 0
        self._num_emitted_tokens = 0
        self._num_emitted_chars = 0

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(self.push_each(token_ids))

    def push_each(self, token_ids: Iterable[int]) -> list[str]:
        return ["" if token_id in self._skipped else self._advance(token_id) for token_id in token_ids]

    def finish(self) -> str:
        delta = self._tokenizer.decode(self._token_ids)[self._num_emitted_chars :]
        self._num_emitted_chars += len(delta)
        return delta

    def _advance(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        emitted = self._tokenizer.decode(self._token_ids[self._window_start : self._num_emitted_tokens])
        text = self._tokenizer.decode(self._token_ids[self._window_start :])
        if len(text) <= len(emitted) or text.endswith(_REPLACEMENT):
            return ""
        delta = text[len(emitted) :]
        self._window_start = self._num_emitted_tokens
        self._num_emitted_tokens = len(self._token_ids)
        self._num_emitted_chars += len(delta)
        return delta
