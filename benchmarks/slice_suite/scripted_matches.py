"""Matches by script, for text that means nothing: how often and how long a sequence finds what stood before."""

import random
from dataclasses import dataclass
from typing import Any

from kimi_backend.scheduler.sequence import Sequence
from kimi_backend.spec_decode.lookup import MatchAcceptance
from kimi_backend.spec_decode.lookup_index import Match, continuation
from kimi_backend.types.plan import Int32Array

SURELY = 1e9
"""Tokens that came as a match foretold, though none was expected to: a scripted match is always taken."""


@dataclass(frozen=True, slots=True)
class MatchScript:
    """A share of the tokens lies in matches of so many tokens each."""

    share: float
    length: int

    @classmethod
    def parse(cls, text: str) -> "MatchScript":
        """`0.5:24`: half of the text, in runs of 24 tokens."""
        share, _, length = text.partition(":")
        script = cls(float(share), int(length or 24))
        if not 0 <= script.share <= 1 or script.length < 1:
            raise ValueError(f"{text!r}: a share of 0 to 1 and a length of 1 token or more are needed, such as 0.5:24")
        return script


class ScriptedLookup:
    """A stand-in for `SequenceLookup`: says that there is a match where the script has one. What it proposes is
    accepted as any draft token of the slice is."""

    held_bytes = 0
    is_crowded = False

    def __init__(self, script: MatchScript, seed: int) -> None:
        self._script, self._rng = script, random.Random(seed)
        self.acceptance = MatchAcceptance()
        self.acceptance.kept = SURELY
        self._is_match, self._num_left, self.num_found = False, 0, 0
        self._turn()

    @property
    def is_following(self) -> bool:
        return self._is_match

    def extend(self, token_ids: list[int], text: Int32Array) -> None:
        self.num_found = len(token_ids) if self._is_match else 0
        self._num_left -= len(token_ids)
        if self._num_left <= 0:
            self._turn()

    def find(self, text: Int32Array, *_: Any) -> Match | None:
        return Match(self._script.length, len(text) // 2) if self._is_match else None

    def continuation(self, text: Int32Array, match: Match, count: int) -> list[int]:
        return continuation(text, match, count)

    def most_draft_tokens(self, most: int) -> int:
        return most

    def _turn(self) -> None:
        """Go on with a match or without, so that the share comes out: both last as long on the average."""
        self._is_match = self._rng.random() < self._script.share
        self._num_left = self._script.length


def follow_script(sequence: Sequence, script: MatchScript) -> Sequence:
    """The sequence, with matches by script."""
    sequence.lookup = ScriptedLookup(script, sequence.uid)  # type: ignore[assignment]
    return sequence
