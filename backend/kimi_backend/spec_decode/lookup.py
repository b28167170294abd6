"""A sequence's own text as its proposer: how often that was right, and the memory that all indexes together take."""

import threading
from contextlib import suppress
from queue import Empty, SimpleQueue

from kimi_backend.spec_decode.acceptance import PRIOR_RATE, AcceptancePool
from kimi_backend.spec_decode.lookup_index import LookupIndex, Match, continuation
from kimi_backend.spec_decode.lookup_pool import LookupPool, PooledMatch
from kimi_backend.types.plan import Int32Array
from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS

NUM_LENGTH_CLASSES = 6
"""Matches of 1, 2 to 3, 4 to 7, 8 to 15, 16 to 31, and of more tokens are counted apart."""
TEXT_MEMORY = 150.0
"""Compared tokens of one text after which an old one counts 1/e."""
TEXT_WEIGHT = 16.0
"""Compared tokens that those of other texts count for in what is expected of one's matches."""
ENDING = 64
"""Tokens of a prompt's end that tell how much a text repeats."""
NUM_REPETITIONS = 3
"""Requests are alike of whose prompts' ends less than a third would have been looked up, less than two, or more."""


class LookupMemory:
    """Bytes of the indexes of all sequences, waiting ones included. Used by any thread."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_refused = 0
        """Sequences that go on without an index, for want of memory."""
        self._num_bytes = 0
        self._given_back: SimpleQueue[int] = SimpleQueue()
        """Bytes that were given back and are not subtracted yet."""
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes that are taken now."""
        with self._lock:
            return self._settled()

    def take(self, num_bytes: int) -> bool:
        """Count so many bytes more. False, and nothing is counted, if that were too many."""
        with self._lock:
            if self._settled() + num_bytes > self.max_bytes:
                self.num_refused += 1
                return False
            self._num_bytes += num_bytes
            return True

    def give_back(self, num_bytes: int) -> None:
        """Count so many less. Takes no lock: the garbage collector may call it while its own thread holds ours."""
        self._given_back.put(num_bytes)

    def _settled(self) -> int:
        with suppress(Empty):
            while True:
                self._num_bytes -= self._given_back.get_nowait()
        return self._num_bytes


class LookupPools:
    """The rate at which what follows a match is right, by the match's length: of all sequences together."""

    def __init__(self) -> None:
        self._pools = [AcceptancePool() for _ in range(NUM_LENGTH_CLASSES)]
        self._are_checked = [True] * NUM_LENGTH_CLASSES

    def of(self, match: Match) -> AcceptancePool:
        """The pool of matches of about this length."""
        return self._pools[_length_class(match)]

    def note(self, match: Match, is_checked: bool) -> None:
        """Tokens of such a match are worth their rows where nobody drafts, or none are."""
        self._are_checked[_length_class(match)] = is_checked

    def are_checked(self, match: Match) -> bool:
        """Tell what was noted of the last match of about this length."""
        return self._are_checked[_length_class(match)]


def _length_class(match: Match) -> int:
    return min(match.length.bit_length(), NUM_LENGTH_CLASSES) - 1


class MatchAcceptance:
    """The difference of one text's matches from those of their lengths in other texts: one factor on all positions."""

    __slots__ = ("expected", "expected_rate", "kept")

    def __init__(self) -> None:
        self.kept = self.expected = 0.0
        """Tokens that came as a match foretold, and how many were expected to; older ones count less."""
        self.expected_rate = PRIOR_RATE
        """The mean rate of matches of about the last one's length."""

    def record(self, num_tokens: int, num_foretold: int) -> None:
        """Count the tokens that came behind the last match, the first ones as it foretold."""
        compared = min(num_foretold + 1, num_tokens)
        fading = 1 - compared / TEXT_MEMORY
        self.kept = fading * self.kept + num_foretold
        self.expected = fading * self.expected + compared * self.expected_rate

    def factor(self, length_mean: float) -> float:
        """Return what to multiply the rates of a match's length by, of which this is the mean; 1 while nothing is
        known. The tokens that come next are expected at this mean."""
        self.expected_rate = length_mean
        weight = TEXT_WEIGHT * length_mean
        return (self.kept + weight) / (self.expected + weight)


class SequenceLookup:
    """The index of one sequence's tokens. Made by any thread, used by the engine's.

    A match is judged by what came, whether it was proposed or not: so its use is never tried out.
    """

    __slots__ = (
        "_elsewhere",
        "_held_bytes",
        "_index",
        "_judged",
        "_memory",
        "_pools",
        "acceptance",
        "num_found",
        "repetition",
    )

    def __init__(self, index: LookupIndex, memory: LookupMemory, held_bytes: int) -> None:
        self._index: LookupIndex | None = index
        self._memory, self._held_bytes = memory, held_bytes
        self._judged: Match | None = None
        self._elsewhere: PooledMatch | None = None
        self._pools: LookupPools | None = None
        self.acceptance = MatchAcceptance()
        self.num_found = 0
        """Tokens, of those that came last, that would have come in verifies of a match if there were no draft."""
        self.repetition = 0
        """The part of its prompt's end that would have been looked up, in NUM_REPETITIONS parts."""

    @classmethod
    def of(cls, token_ids: Int32Array, min_match: int, memory: LookupMemory) -> "SequenceLookup | None":
        """Index a prompt; None where there is no memory for it. Work grows with the prompt: 0.1 µs a token."""
        num_bytes = LookupIndex.bytes_of(len(token_ids))
        if not memory.take(num_bytes):
            return None
        index = LookupIndex(token_ids, min_match)
        lookup = cls(index, memory, num_bytes)
        count = min(ENDING, len(token_ids) - 1)
        if count > 0:
            num_found = lookup._count_found(index, token_ids, token_ids[-count:].tolist(), 0)
            lookup.repetition = min(NUM_REPETITIONS * num_found // count, NUM_REPETITIONS - 1)
        return lookup

    def __del__(self) -> None:
        self._drop()

    @property
    def held_bytes(self) -> int:
        """Memory of its index; 0 where that was given up."""
        return self._held_bytes

    @property
    def is_following(self) -> bool:
        """True while all that came since the last match was found is what the match foretold."""
        return self._index is not None and (self._index.has_match or self._elsewhere is not None)

    def extend(self, token_ids: list[int], text: Int32Array) -> None:
        """Go on behind tokens that count: `text` ends in them."""
        index, match, num_found = self._index, self._judged, 0
        if index is None:
            self.num_found = 0
            return
        num_foretold = index.extend(token_ids, text)
        if self._elsewhere is not None:
            num_foretold, self._elsewhere = self._elsewhere.foretells(token_ids)
        if match is not None:
            if self._is_checked(match):
                num_found = min(num_foretold + 1, len(token_ids))
            self._judge(match, len(token_ids), num_foretold)
        self.num_found = self._count_found(index, text, token_ids, num_found)
        self._count_bytes(index)

    @property
    def is_crowded(self) -> bool:
        """Its index should grow, as soon as there is time for it."""
        return self._index is not None and self._index.is_crowded

    def grow(self, text: Int32Array) -> None:
        """Make a crowded index larger; it is given up if there is no memory for that. Work grows with the text."""
        assert self._index is not None
        self._index.index_all(text)
        self._count_bytes(self._index)

    def find(
        self, text: Int32Array, pools: LookupPools, texts: LookupPool | None = None, salt: str | None = None
    ) -> Match | None:
        """The match of the text's end, its own or a longer one among `texts`. It is judged by what comes next.

        Args:
            texts: those of ended requests, of which only the salt's count.
        """
        index = self._index
        if index is None:
            return None
        is_following = self.is_following
        match = None if self._elsewhere is not None else index.find(text)
        if texts is not None and not is_following:
            self._elsewhere = texts.find(salt, index, text, 1 if match is None else match.length + 1)
        match = match if self._elsewhere is None else self._elsewhere.match
        self._pools, self._judged = pools, match
        return match

    def continuation(self, text: Int32Array, match: Match, count: int) -> list[int]:
        """The tokens that follow the match which was found last, at most `count`."""
        return continuation(text, match, count) if self._elsewhere is None else self._elsewhere.continuation(count)

    def most_draft_tokens(self, most: int) -> int:
        """Count what follows the match that was found last, up to `most`."""
        return most if self._elsewhere is None else len(self._elsewhere.continuation(most))

    def take_index(self) -> LookupIndex | None:
        """Its index for somebody else to keep; this lookup is at its end."""
        index = self._index
        self._drop()
        return index

    def _count_found(self, index: LookupIndex, text: Int32Array, token_ids: list[int], num_found: int) -> int:
        """Go through what `text` ends in as if nobody had drafted: a draft's tokens reach into matches that would have
        been found. Searches only where a draft was right: no match that is checked was found before the first token, or
        `num_found` of these would have come in that one's verify.
        """
        place, start = max(num_found, 1), len(text) - len(token_ids)
        while place < len(token_ids):
            match = index.find_at(text, start + place)
            if match is None or not self._is_checked(match):
                place += 1
                continue
            came = token_ids[place:]
            count = min(match.foretells(text, came)[0] + 1, len(came))
            num_found, place = num_found + count, place + count
        return num_found

    def _is_checked(self, match: Match) -> bool:
        return self._pools is None or self._pools.are_checked(match)

    def _judge(self, match: Match, num_tokens: int, num_foretold: int) -> None:
        assert self._pools is not None
        num_tokens = min(num_tokens, MAX_SPECULATIVE_TOKENS)
        num_foretold = min(num_foretold, num_tokens)
        self._pools.of(match).record(num_tokens, num_foretold)
        self.acceptance.record(num_tokens, num_foretold)
        self._judged = None

    def _count_bytes(self, index: LookupIndex) -> None:
        num_more = index.num_bytes - self._held_bytes
        if not num_more:
            return
        if self._memory.take(num_more):
            self._held_bytes += num_more
        else:
            self._drop()

    def _drop(self) -> None:
        self._index = None
        self._memory.give_back(self._held_bytes)
        self._held_bytes = 0
