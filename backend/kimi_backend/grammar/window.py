"""A sequence's place in its grammar, and what the next verify's rows may draw.

The matcher stands behind the tokens that count, always: it goes ahead over a window's draft tokens to make the masks of
their rows, and comes back at once.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kimi_backend.grammar.matcher import CompiledGrammar, Matcher
from kimi_backend.types.grammar import Grammar
from kimi_backend.types.plan import Int32Array

SPARE_SECONDS, SECONDS_A_TOKEN = 0.5, 0.01
"""The processor time that a grammar may take of the engine's thread: one with many readings of a text takes
more with every token, and everybody waits for it."""


@dataclass(frozen=True, slots=True)
class Window:
    """A window holds what a verify checks of a sequence."""

    token_ids: list[int]
    masks: list[Int32Array | None]
    """[len(token_ids) + 1, num_words] the tokens that each row may draw if those before it are right; None: all."""
    num_forced: int
    """Draft tokens that the grammar forces, since nothing else can come; the others are the draft's."""
    num_drafted: int
    """Tokens that the draft proposed, those that do not fit included; 0 where a draft token is not its own, which says
    nothing of it."""


@dataclass(slots=True)
class SequenceGrammar:
    """The grammar of one sequence. Owned by the engine's thread."""

    begins_after: int | None
    """See `Grammar.begins_after`."""
    before: Int32Array | None
    """[num_words] what may come before the grammar begins; None: all."""
    matcher: Matcher
    num_words: int
    """ceil(vocab_size / 32)."""
    stop_token_ids: frozenset[int]
    """Those that end the reply: never proposed, as nothing can follow."""
    is_begun: bool = field(init=False)
    _left_s: float = field(default=SPARE_SECONDS, init=False)

    def __post_init__(self) -> None:
        self.is_begun = self.begins_after is None

    @classmethod
    def of(cls, grammar: Grammar, compiled: CompiledGrammar, stop_token_ids: frozenset[int]) -> "SequenceGrammar":
        """That of a sequence which begins."""
        text, begin, before = compiled.text_mask, grammar.begins_after, None
        if begin is not None and grammar.must_begin:
            before = text.copy()
            before[begin // 32] |= np.uint32(1 << begin % 32).view(np.int32)
        return cls(begin, before, compiled.matcher(), len(text), stop_token_ids)

    @property
    def is_too_slow(self) -> bool:
        """Tell whether it has taken more time than it may."""
        return self._left_s < 0

    def advance(self, token_ids: Iterable[int]) -> bool:
        """Go on behind tokens that count. False, where one may not come: it was drawn without its mask."""
        start_s, token_ids = time.thread_time(), list(token_ids)
        fits = all(self._follow(token_id) for token_id in token_ids)
        self._left_s += SECONDS_A_TOKEN * len(token_ids) - (time.thread_time() - start_s)
        return fits

    def look_ahead(self, proposals: Sequence[int], most: int) -> Window:
        """The draft tokens that a verify should check: what is forced, else the draft's proposals while they fit.

        Args:
            proposals: the draft's, which hold as long as all draft tokens before one are its own.
            most: draft tokens at most.
        """
        start_s = time.thread_time()
        token_ids: list[int] = []
        masks: list[Int32Array | None] = []
        num_forced, num_followed, was_begun = 0, 0, self.is_begun
        while True:
            mask = self._mask()
            masks.append(mask)
            if len(token_ids) == most:
                break
            is_own = token_ids == list(proposals[: len(token_ids)])
            proposal = proposals[len(token_ids)] if is_own and len(token_ids) < len(proposals) else None
            forced = self.matcher.forced(mask) if self.is_begun and mask is not None else None
            token_id = proposal if forced is None else forced
            if token_id is None or token_id in self.stop_token_ids or not _allows(mask, token_id):
                break
            is_in_grammar = self.is_begun
            if not self._follow(token_id):
                break
            num_followed += is_in_grammar
            num_forced += token_id != proposal
            token_ids.append(token_id)
        self.matcher.rollback(num_followed)
        self.is_begun = was_begun
        self._left_s -= time.thread_time() - start_s
        return Window(token_ids, masks, num_forced, 0 if num_forced else len(proposals))

    def _follow(self, token_id: int) -> bool:
        if self.is_begun:
            return self.matcher.accept(token_id)
        self.is_begun = token_id == self.begins_after
        return True

    def _mask(self) -> Int32Array | None:
        if not self.is_begun:
            return self.before
        words = np.zeros(self.num_words, np.int32)
        self.matcher.fill(words)
        return words


def _allows(mask: Int32Array | None, token_id: int) -> bool:
    return mask is None or bool(mask[token_id // 32] >> (token_id % 32) & 1)
