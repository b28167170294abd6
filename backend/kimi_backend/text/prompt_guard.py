"""Keeps a client's text from becoming control tokens on its way through a chat template.

A template mixes its own markup with the client's strings into one text, and afterwards nobody can tell whose
`<|im_end|>` was which. So before the template runs, every string of the client that could take part in a control token
gets one character replaced by a stand-in: a private-use code point that occurs nowhere in the request or the template.
Control tokens are then looked for in the rendered text, which finds exactly the template's, and only after that do the
stand-ins turn back.

Replaced are: the first character of each control token inside the string; the last one when a control token could begin
at the string's end, the first one when one could end at its start, and the first one when the whole string could lie
inside one. Text without such places, nearly all text, is untouched, and it is tokenised together with the markup
around it, as it was in training. A template that itself rewrites the client's text (changes its case, deletes from its
middle) works around this; Kimi's does not.
"""

import itertools
from collections.abc import Collection, Iterable
from typing import Any

from kimi_backend.errors import InvalidRequestError
from kimi_backend.text.special_tokens import Finder, pieces_of

_PRIVATE_USE_PLANES = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class PromptGuard:
    """Knows where a string touches a control token. Immutable."""

    def __init__(self, control_tokens: Collection[str]) -> None:
        self._finder = Finder(control_tokens)
        self._beginnings = {token[:size] for token in control_tokens for size in range(1, len(token))}
        self._endings = {token[-size:] for token in control_tokens for size in range(1, len(token))}
        self._longest = max(map(len, control_tokens), default=0)
        self._tokens = tuple(control_tokens)
        self._alphabet = sorted({char for token in control_tokens for char in token})

    def is_harmless(self, text: str, alone: bool = False) -> bool:
        """Tell whether `text` needs no stand-in. `alone`: nothing of the client's holds it inside a larger string."""
        if not text:
            return True
        sizes = range(1, min(len(text), self._longest) + 1)
        return not (
            self._finder.find(text)
            or any(text[-size:] in self._beginnings or text[:size] in self._endings for size in sizes)
            or (alone and self.is_part_of_token(text))
        )

    def is_part_of_token(self, text: str) -> bool:
        """Tell whether a control token holds the whole text."""
        return len(text) <= self._longest and any(text in token for token in self._tokens)

    def choose_stand_ins(self, taken: Iterable[str]) -> "StandIns":
        """Stand-ins that occur in none of the given texts.

        Raises:
            InvalidRequestError: the texts use up the private-use planes.
        """
        used: set[str] = set()
        for text in taken:
            if not text.isascii():
                for piece in pieces_of(text):
                    used.update(piece)
        free = (chr(code) for plane in _PRIVATE_USE_PLANES for code in plane if chr(code) not in used)
        table = dict(zip(self._alphabet, free, strict=False))
        if len(table) < len(self._alphabet):
            raise InvalidRequestError("messages use nearly every private-use character; leave a few hundred unused")
        return StandIns(self, table)


class StandIns:
    """One request's replacement characters."""

    def __init__(self, guard: PromptGuard, table: dict[str, str]) -> None:
        self._guard = guard
        self._table = table
        self._back = str.maketrans({stand_in: char for char, stand_in in table.items()})

    def restore(self, text: str) -> str:
        """The text with every stand-in turned back."""
        return text if text.isascii() else "".join(piece.translate(self._back) for piece in pieces_of(text))

    def protect(self, text: str, alone: bool = False) -> str:
        """The text, disarmed."""
        guard = self._guard
        if guard.is_harmless(text, alone):
            return text
        result = text
        # A second round finds tokens that overlapped one of the first.
        while starts := [match.start() for match in guard._finder.find_all(result)]:
            begins = zip([0, *(start + 1 for start in starts)], [*starts, len(result)], strict=True)
            kept = [result[begin:end] for begin, end in begins]
            replaced = [self._table[result[start]] for start in starts]
            result = "".join(itertools.chain.from_iterable(zip(kept, [*replaced, ""], strict=True)))
        sizes = range(1, min(len(result), guard._longest) + 1)
        if any(result[-size:] in guard._beginnings for size in sizes):
            result = result[:-1] + self._table[result[-1]]
        if any(result[:size] in guard._endings for size in sizes) or (alone and guard.is_part_of_token(result)):
            result = self._table[result[0]] + result[1:]
        return result

    def protect_json(self, value: Any) -> Any:
        """Every string in a JSON value, keys too, disarmed."""
        if isinstance(value, str):
            return self.protect(value)
        if isinstance(value, dict):
            return {self.protect(key): self.protect_json(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.protect_json(item) for item in value]
        return value


def strings_in(value: Any) -> Iterable[str]:
    """Every string in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)
