"""The way from a request's new token ids to the text its client gets: detokenizer, then stop strings.

A control token that shows in the text, such as `<|tool_call_begin|>`, and the same letters spelled by ordinary tokens
look alike there. Whoever reads the text is told where the control tokens are.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kimi_backend.text.detokenizer import make_detokenizer
from kimi_backend.text.stop_strings import StopMatch, StopStringMatcher
from kimi_backend.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextUpdate:
    """The text that one push adds."""

    text: str
    num_tokens: int
    """The number of the pushed tokens that count: all, or up to the one that completed a stop string."""
    matched_stop: str | None = None
    token_offsets: tuple[int, ...] = ()
    """Characters of the request's whole text before its own, for each token that counts, where asked for."""
    control_offsets: tuple[int, ...] = ()
    """Characters of the request's whole text before each control token among the pushed tokens that shows."""


class TextStream:
    """One request's output text. Not for several threads at once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
        with_offsets: bool = False,
    ) -> None:
        """Args:
        stops: stop strings, found across token and push borders.
        include_stop: keep the stop string in the text.
        skip_special: leave special tokens out of the text.
        min_tokens: the text of the first min_tokens tokens is not searched.
        with_offsets: updates say where each token's text begins.

        Raises:
            InvalidRequestError: an empty or malformed stop string.
        """
        self._detokenizer = make_detokenizer(tokenizer, skip_special)
        self._matcher = StopStringMatcher(stops, include_stop)
        self._has_stops = bool(stops)
        self._num_unsearched = min_tokens if stops else 0
        self._matched = False
        hidden = tokenizer.special_token_ids if skip_special else frozenset()
        self._shown_controls = {i: text for text, i in tokenizer.control_tokens.items() if i not in hidden}
        self._num_decoded = 0
        self._with_offsets = with_offsets

    @property
    def num_chars(self) -> int:
        """Characters decoded so far, those that wait for a stop string included."""
        return self._num_decoded

    def push(self, token_ids: Sequence[int]) -> TextUpdate:
        """The text that these tokens complete. After a match nothing counts any more."""
        if self._matched:
            return TextUpdate(text="", num_tokens=0)
        needs_pieces = self._has_stops or self._with_offsets
        if not needs_pieces and self._shown_controls.keys().isdisjoint(token_ids):
            text = self._detokenizer.push(token_ids)
            self._num_decoded += len(text)
            return TextUpdate(text=text, num_tokens=len(token_ids))
        pieces = self._detokenizer.push_each(token_ids)
        starts = self._starts(pieces) if self._with_offsets else ()
        offsets = self._control_offsets(token_ids, pieces)
        num_unsearched = min(self._num_unsearched, len(pieces))
        self._num_unsearched -= num_unsearched
        unsearched = "".join(pieces[:num_unsearched])
        text, match = self._matcher.push("".join(pieces[num_unsearched:]))
        if match is None:
            text = unsearched + text
            return TextUpdate(text=text, num_tokens=len(token_ids), token_offsets=starts, control_offsets=offsets)
        self._matched = True
        update = self._last_update(unsearched + text, pieces, num_unsearched, match, offsets)
        return dataclasses.replace(update, token_offsets=starts[: update.num_tokens])

    def _starts(self, pieces: Sequence[str]) -> tuple[int, ...]:
        """Characters before each piece. A token whose bytes wait for more begins where those come out."""
        return tuple(accumulate(map(len, pieces), initial=self._num_decoded))[:-1]

    def _control_offsets(self, token_ids: Sequence[int], pieces: Sequence[str]) -> tuple[int, ...]:
        offsets = []
        for token_id, piece in zip(token_ids, pieces, strict=True):
            self._num_decoded += len(piece)
            # Bytes of a character that the control token cut off come before it, as U+FFFD.
            if (control := self._shown_controls.get(token_id)) is not None and piece.endswith(control):
                offsets.append(self._num_decoded - len(control))
        return tuple(offsets)

    @staticmethod
    def _last_update(
        text: str, pieces: list[str], num_unsearched: int, match: StopMatch, offsets: tuple[int, ...]
    ) -> TextUpdate:
        """The update for a match: the last token that counts is the one that completed the stop string."""
        num_chars_after = 0
        num_tokens = len(pieces)
        while (
            num_tokens > num_unsearched + 1 and num_chars_after + len(pieces[num_tokens - 1]) <= match.num_chars_after
        ):
            num_tokens -= 1
            num_chars_after += len(pieces[num_tokens])
        return TextUpdate(
            text=text,
            num_tokens=num_tokens,
            matched_stop=match.stop,
            control_offsets=offsets,
        )

    def finish(self) -> TextUpdate:
        """Return what was held back, for a request that ended for another reason than a stop string. Call once.

        The last bytes may complete a stop string (one that holds U+FFFD); then it is cut off here.
        """
        if self._matched:
            return TextUpdate(text="", num_tokens=0)
        text, match = self._matcher.push(self._detokenizer.finish())
        if match is None:
            return TextUpdate(text=text + self._matcher.flush(), num_tokens=0)
        self._matched = True
        return TextUpdate(text=text, num_tokens=0, matched_stop=match.stop)
