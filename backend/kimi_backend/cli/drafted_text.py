"""Text in the terminal as it comes, with what was proposed in color: by the draft, or by what stood in it before."""

import time

from rich.console import Console
from rich.text import Text

from kimi_backend.types.request import TokenOrigin
from kimi_client.text_origins import TextOrigins, TextWithOrigins

COMMANDS = dict.fromkeys([*(c for c in range(32) if chr(c) not in "\n\t"), *range(127, 160)])
"""Characters that tell a terminal to do something; text of a model may not."""
STYLES = {TokenOrigin.TARGET: "", TokenOrigin.DRAFT: "green", TokenOrigin.LOOKUP: "cyan"}


class DraftedText:
    """Shows one completion. Where standard output is no terminal, the text comes plain."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._origins = TextOrigins()
        self._begun_s = time.monotonic()
        self._num_tokens: list[int] = []

    def show(self, source: TextWithOrigins) -> None:
        """Write what came next; of a request with `return_token_origins`."""
        self._origins.add(source)
        if source.token_origins:
            self._num_tokens.append(len(source.token_origins))
        start = 0
        for origin, num_chars in self._origins.of(source.text):
            piece = source.text[start : start + num_chars]
            self._console.print(Text(piece.translate(COMMANDS), STYLES[TokenOrigin(origin)]), end="")
            start += num_chars

    def summary(self) -> str:
        """Numbers of what came so far, for a reader; a round is what came at once, the first token is of none."""
        seconds = time.monotonic() - self._begun_s
        total, rounds = sum(self._num_tokens), self._num_tokens[1:]
        per_round = f", {sum(rounds) / len(rounds):.2f} a round" if rounds else ""
        return f"{total} tokens, {total / seconds:.0f} a second{per_round}"
