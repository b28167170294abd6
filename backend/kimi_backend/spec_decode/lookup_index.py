"""Finds where the last tokens of a growing text stood before, so that what came next can be proposed again.

Each place is linked to the latest one before it whose last `min_match` tokens hash alike; a search goes back along
these links and compares backwards from each. A match that goes on costs one comparison a token and no search.
"""

from array import array
from typing import NamedTuple

import numpy as np

from kimi_backend.types.plan import Int32Array

MOST_CANDIDATES = 64
"""Places that one search looks at, the latest ones: work a search is bounded, whatever a client's text repeats."""
NOWHERE = -1
_FACTOR, _SPREAD, _MASK = 0x9E3779B1, 0x85EBCA6B, 0xFFFFFFFF
_LEAST_BITS = 6
_FIRST_CHUNK = 32
_COMPARED_FIRST = 32
_MOST_CROWDED = 2
"""Times the places that its table is made for: one that nobody has grown by then grows as it is extended."""
_BYTES_A_PLACE = 9
"""4 of the table, 4 of a link, and what an array that grows holds ahead."""


class Match(NamedTuple):
    """An earlier place whose last tokens are the text's: text[end - length : end] == text[n - length : n], end < n."""

    length: int
    end: int

    def foretells(self, source: Int32Array, token_ids: list[int]) -> "tuple[int, Match | None]":
        """Count those of these tokens, one after the other, that stand behind the match; return the match behind them
        too, if it goes on.

        Args:
            source: the text that has the earlier place.
        """
        end = self.end + len(token_ids)
        foretold = source[self.end : end].tolist()
        if foretold == token_ids and end < len(source):
            return len(token_ids), Match(self.length + len(token_ids), end)
        pairs = zip(foretold, token_ids, strict=False)
        return next((i for i, (guess, token_id) in enumerate(pairs) if guess != token_id), len(foretold)), None


class LookupIndex:
    """The places of one text. Grows with it, and knows no token that is not given to it."""

    __slots__ = ("_bits", "_hash", "_heads", "_links", "_match", "_min_match", "_tail", "_top")

    _links: "array[int]"
    _heads: "array[int]"
    _tail: list[int]
    _hash: int

    def __init__(self, token_ids: Int32Array, min_match: int) -> None:
        """
        Args:
            token_ids: [n] the text so far, 1 token or more.
            min_match: tokens that are the least to count as a match, 1 or more.
        """
        self._min_match = min_match
        self._top = pow(_FACTOR, min_match - 1, _MASK + 1)
        self._match: Match | None = None
        self.index_all(token_ids)

    @property
    def num_bytes(self) -> int:
        """Memory of the links and of the table, with room for as many tokens as the table has places. One that is
        crowded takes 5 bytes more for each token beyond."""
        return _BYTES_A_PLACE << self._bits

    @staticmethod
    def bytes_of(num_tokens: int) -> int:
        """`num_bytes` of an index that is made of so many tokens."""
        return _BYTES_A_PLACE << _bits_of(num_tokens)

    @property
    def is_crowded(self) -> bool:
        """It holds more places than its table is made for, so that searches look at places in vain."""
        return len(self._links) > len(self._heads)

    @property
    def has_match(self) -> bool:
        """True where a match was found and has gone on since."""
        return self._match is not None

    def extend(self, token_ids: list[int], text: Int32Array) -> int:
        """Go on with the text.

        Args:
            token_ids: what has come.
            text: [n] all of it, these tokens included.

        Returns:
            How many of the tokens the last match foretold, one after the other.
        """
        num_foretold = 0
        if self._match is not None:
            num_foretold, self._match = self._match.foretells(text, token_ids)
        if len(self._links) + len(token_ids) > _MOST_CROWDED * len(self._heads):
            self.index_all(text)
            return num_foretold
        min_match, top, links, heads, shift = self._min_match, self._top, self._links, self._heads, 32 - self._bits
        window, value, place = self._tail + token_ids, self._hash, len(self._links)
        for first, token_id in zip(window, token_ids, strict=False):
            value = ((value - first * top) * _FACTOR + token_id) & _MASK
            bucket = (value * _SPREAD & _MASK) >> shift
            links.append(heads[bucket])
            heads[bucket] = place
            place += 1
        self._tail, self._hash = window[-min_match:], value
        return num_foretold

    def index_all(self, text: Int32Array) -> None:
        """Make the table, as large as the text asks for, and all links at once: 0.1 µs a token."""
        count, min_match = len(text), self._min_match
        self._bits = _bits_of(count)
        self._tail = [0] * max(min_match - count, 0) + text[-min_match:].tolist()
        padded = np.concatenate([np.zeros(min_match - 1, np.uint32), text.astype(np.uint32)])
        values = np.zeros(count, np.uint32)
        for first in range(min_match):
            values = values * np.uint32(_FACTOR) + padded[first : first + count]
        buckets = (values * np.uint32(_SPREAD)) >> np.uint32(32 - self._bits)
        keys = np.sort((buckets.astype(np.int64) << 32) | np.arange(count))
        places, order = (keys & _MASK).astype(np.int32), keys >> 32
        is_linked = order[1:] == order[:-1]
        links, heads = np.full(count, NOWHERE, np.int32), np.full(1 << self._bits, NOWHERE, np.int32)
        links[places[1:][is_linked]] = places[:-1][is_linked]
        heads[order] = places  # rising within a bucket, so that the last one stays
        self._links, self._heads = array("i", links.tobytes()), array("i", heads.tobytes())
        self._hash = int(values[-1])

    def find(self, text: Int32Array) -> Match | None:
        """The longest match, of several the latest; among the MOST_CANDIDATES latest places, unless it goes on."""
        if self._match is None:
            self._match = self.find_at(text, len(text))
        return self._match

    def find_end_of(self, other: "LookupIndex", text: Int32Array, source: Int32Array) -> Match | None:
        """The longest match in this index's text, `source`, of what another ends in.

        Args:
            other: the index of `text`, with the same `min_match`.
        """
        bucket = (other._hash * _SPREAD & _MASK) >> (32 - self._bits)
        return self._longest(self._heads[bucket], source, text)

    def find_at(self, text: Int32Array, place: int) -> Match | None:
        """Find what `find` would have found when the text had so many tokens."""
        before = self._links[place - 1]
        return None if before < self._min_match - 1 else self._longest(before, text, text[:place])

    def _longest(self, place: int, source: Int32Array, text: Int32Array) -> Match | None:
        """The place, of those from one on along the links, up to which `source` has most of what `text` ends in."""
        last, best, end = len(text) - 1, self._min_match - 1, NOWHERE
        tokens, wanted, links, num_left = source.data, text.data, self._links, MOST_CANDIDATES
        near = min(best, _COMPARED_FIRST)
        ending = wanted[last - near :]
        while place >= best and num_left and last >= best:
            # What costs little is compared first: where a text has few tokens, most places agree by chance.
            if tokens[place - best] == wanted[last - best] and tokens[place - near : place + 1] == ending:
                length = _common_length(source, place, text)
                if length > best:
                    best, end = length, place + 1
                    near = min(best, _COMPARED_FIRST)
                    ending = wanted[last - near :]
            place = links[place]
            num_left -= 1
        return None if end == NOWHERE else Match(best, end)


def _bits_of(num_tokens: int) -> int:
    return max(_LEAST_BITS, (num_tokens - 1).bit_length())


def continuation(text: Int32Array, match: Match, count: int) -> list[int]:
    """`count` tokens that follow a match; one that reaches the text's end goes on with what it proposes itself."""
    found: list[int] = text[match.end : match.end + count].tolist()
    period = len(text) - match.end
    while len(found) < count:
        found.append(found[len(found) - period])
    return found


def _common_length(source: Int32Array, place: int, text: Int32Array) -> int:
    """Count the tokens of `source` up to the one at `place` that are the last ones of `text`."""
    length, chunk, most = 0, _FIRST_CHUNK, min(place + 1, len(text))
    while length < most:
        size = min(chunk, most - length)
        first, second = place + 1 - length - size, len(text) - length - size
        differs = source[first : first + size] != text[second : second + size]
        if differs.any():
            return length + int(differs[::-1].argmax())
        length, chunk = length + size, 4 * chunk
    return length
