"""Log-probabilities in the two forms of the API."""

from collections.abc import Sequence
from typing import Any

from kimi_client import TokenLogprob

_REPLACEMENT = "\ufffd"


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    return {"content": [_chat_entry(entry) for entry in entries], "refusal": None}


def _chat_entry(entry: TokenLogprob) -> dict[str, Any]:
    top = zip(entry.top, entry.top_tokens, strict=True)
    return {
        **_chat_token(entry.token, entry.logprob),
        "top_logprobs": [_chat_token(token, logprob) for (_, logprob), token in top],
    }


def _chat_token(token: str, logprob: float) -> dict[str, Any]:
    # The server shows bytes that are no whole character as U+FFFD: what they were is not known here.
    known = None if _REPLACEMENT in token else list(token.encode())
    return {"token": token, "logprob": logprob, "bytes": known}


class CompletionLogprobs:
    """`choices[].logprobs` of a completion, piece by piece: offsets go on from one to the next."""

    def __init__(self) -> None:
        self._offset = 0

    def take(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The object for these tokens; `text_offset` counts characters of the tokens alone."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(entry.token)
        return {
            "tokens": [entry.token for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [_by_token(entry) for entry in entries],
            "text_offset": offsets,
        }


def _by_token(entry: TokenLogprob) -> dict[str, float]:
    """The most likely tokens, then the drawn one; of two that look alike the likelier stays."""
    found: dict[str, float] = {}
    for (_, logprob), token in zip(entry.top, entry.top_tokens, strict=True):
        found.setdefault(token, logprob)
    found.setdefault(entry.token, entry.logprob)
    return found
