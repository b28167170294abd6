"""Texts of requests that have ended, where others of the same cache salt may find what comes next."""

from collections import OrderedDict, deque
from typing import NamedTuple

from kimi_backend.spec_decode.lookup_index import LookupIndex, Match
from kimi_backend.types.plan import Int32Array

MOST_TEXTS = 8
"""Texts of one salt, the latest ones: a search looks into each."""


class PooledMatch(NamedTuple):
    """A match in another text: source[end - length : end] is what the searching text ends in."""

    source: Int32Array
    match: Match

    def foretells(self, token_ids: list[int]) -> tuple[int, "PooledMatch | None"]:
        """See `Match`."""
        count, match = self.match.foretells(self.source, token_ids)
        return count, None if match is None else PooledMatch(self.source, match)

    def continuation(self, count: int) -> list[int]:
        """The tokens that follow, as far as the other text goes."""
        found: list[int] = self.source[self.match.end : self.match.end + count].tolist()
        return found


class LookupPool:
    """Used by the engine's thread. What one salt has kept, no other ever sees."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of all texts and their indexes; 0 keeps none."""
        self._max_bytes = max_bytes
        self._texts: OrderedDict[str | None, deque[tuple[Int32Array, LookupIndex]]] = OrderedDict()
        self.num_bytes = 0

    def keep(self, salt: str | None, text: Int32Array, index: LookupIndex) -> None:
        """Take a text that has ended over, with its index; the texts of the salt that was used longest ago go."""
        text = text.copy()  # its array has room for more tokens
        num_bytes = _bytes_of(text, index)
        if num_bytes > self._max_bytes:
            return
        texts = self._texts.setdefault(salt, deque())
        self._texts.move_to_end(salt)
        texts.append((text, index))
        self.num_bytes += num_bytes
        while len(texts) > MOST_TEXTS or self.num_bytes > self._max_bytes:
            self._forget(salt if len(texts) > MOST_TEXTS else next(iter(self._texts)))

    def find(self, salt: str | None, index: LookupIndex, text: Int32Array, min_length: int) -> PooledMatch | None:
        """The longest match of at least so many tokens, of several that of the latest text.

        Args:
            index: of the searching text.
        """
        best: PooledMatch | None = None
        for source, other in reversed(self._texts.get(salt, ())):
            match = other.find_end_of(index, text, source)
            if match is not None and match.length >= min_length and match.end < len(source):
                best, min_length = PooledMatch(source, match), match.length + 1
        return best

    def _forget(self, salt: str | None) -> None:
        texts = self._texts[salt]
        self.num_bytes -= _bytes_of(*texts.popleft())
        if not texts:
            del self._texts[salt]


def _bytes_of(text: Int32Array, index: LookupIndex) -> int:
    return text.nbytes + index.num_bytes
