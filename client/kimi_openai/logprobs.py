"""Log-probabilities in the two forms of the API."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from kimi_client import PromptLogprob, TokenLogprob
from kimi_client.replies.markers import MARKS, Mark
from kimi_client.replies.text import CALLS, REASONING, Channel

_REPLACEMENT = "\ufffd"


class ChatLogprobs:
    """`choices[].logprobs` of a chat, piece by piece: a list for each part of the message that tokens belong to."""

    def __init__(self) -> None:
        self._waiting: deque[TokenLogprob] = deque()
        self._num_controls = 0

    def take(
        self, entries: Sequence[TokenLogprob], channels: Sequence[Channel], *, is_last: bool
    ) -> dict[str, Any] | None:
        """The object for these tokens and those that waited; None where there is none.

        Args:
            channels: `ReplyReader.channels` so far. A token waits while its channel is not known.
            is_last: the reply has ended; nothing waits any more.
        """
        self._waiting.extend(entries)
        found: dict[str, list[dict[str, Any]]] = {}
        while self._waiting:
            # No ordinary token is spelled like a whole marker.
            mark = MARKS.get(self._waiting[0].token)
            is_known = self._num_controls + (mark is not None) < len(channels)
            name = channels[min(self._num_controls, len(channels) - 1)].name
            if not is_last and not (is_known and name is not None):
                break
            if mark is not None:
                self._num_controls += 1
                is_thought = mark in (Mark.THINK_BEGIN, Mark.THINK_END)
                name = (REASONING if is_thought else CALLS).name
            found.setdefault(name or "content", []).append(_chat_entry(self._waiting.popleft()))
        return {"content": [], "refusal": None, **found} if found else None


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

    def __init__(self, num_top: int) -> None:
        """num_top: most likely tokens to show beside each."""
        self._num_top = num_top
        self._offset = 0

    def take(self, entries: Sequence[TokenLogprob | PromptLogprob]) -> dict[str, Any]:
        """The object for these tokens; `text_offset` counts characters of the tokens alone."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(entry.token)
        return {
            "tokens": [entry.token for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [self._by_token(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _by_token(self, entry: TokenLogprob | PromptLogprob) -> dict[str, float] | None:
        """The most likely tokens, then the token itself; of two that look alike the likelier stays. None of a prompt's
        first token."""
        if entry.logprob is None:
            return None
        found: dict[str, float] = {}
        for (_, logprob), token in zip(entry.top[: self._num_top], entry.top_tokens, strict=False):
            found.setdefault(token, logprob)
        found.setdefault(entry.token, entry.logprob)
        return found


def shown_prompt_logprobs(entries: Sequence[PromptLogprob], num_top: int | None) -> dict[str, Any]:
    """The field that `prompt_logprobs` adds, in vLLM's form: null for the first token, for each other one an object
    of its most likely tokens and itself by id.

    Args:
        num_top: the field's value; None: it was not given.
    """
    return {} if num_top is None else {"prompt_logprobs": [_by_id(entry, num_top) for entry in entries]}


def _by_id(entry: PromptLogprob, num_top: int) -> dict[str, Any] | None:
    if entry.logprob is None:
        return None
    tops = zip(entry.top[:num_top], entry.top_tokens, strict=False)
    found = {str(token_id): _ranked(logprob, rank, token) for rank, ((token_id, logprob), token) in enumerate(tops, 1)}
    return found | {str(entry.token_id): _ranked(entry.logprob, entry.rank, entry.token)}


def _ranked(logprob: float, rank: int | None, token: str) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": token}
