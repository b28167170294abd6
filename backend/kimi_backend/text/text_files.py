"""Files of text as token ids, for commands that read a corpus: plain text, or JSON lines."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kimi_backend.errors import InvalidRequestError
from kimi_backend.text.tokenizer import Tokenizer

JSON_LINES_SUFFIX = ".jsonl"
_NEEDED = "a JSON object with text, token_ids or messages is needed"

EncodeChat = Callable[[Any], list[int]]
"""A conversation's messages -> token ids."""


def read_documents(path: Path, tokenizer: Tokenizer, encode_chat: EncodeChat | None) -> Iterator[list[int]]:
    """Token ids of each document in a file, an end token after each text.

    A name that ends in .jsonl holds one document a line: `{"text": …}`, `{"token_ids": […]}`, or `{"messages": […]}`,
    which the chat template renders. Any other file is one text.

    Raises:
        InvalidRequestError: the file cannot be read or a line is wrong; names the line.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path}: byte {error.start} is not UTF-8") from None
    if path.suffix != JSON_LINES_SUFFIX:
        yield _ended(tokenizer.encode(content), tokenizer)
        return
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            yield _parse_line(line, f"{path}:{number}", tokenizer, encode_chat)


def _parse_line(line: str, where: str, tokenizer: Tokenizer, encode_chat: EncodeChat | None) -> list[int]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where}: not valid JSON: {error}") from None
    fields = [name for name in ("text", "token_ids", "messages") if isinstance(entry, dict) and name in entry]
    if len(fields) == 1:
        value = entry[fields[0]]
        if fields == ["text"] and isinstance(value, str):
            return _ended(tokenizer.encode(value), tokenizer)
        if fields == ["token_ids"] and _are_ids(value, tokenizer.vocab_size):
            return list(value)
        if fields == ["messages"]:
            return _render(value, where, encode_chat)
    raise InvalidRequestError(f"{where}: {line[:80]} given, {_NEEDED}")


def _render(messages: Any, where: str, encode_chat: EncodeChat | None) -> list[int]:
    if encode_chat is None:
        raise InvalidRequestError(f"{where}: messages given, but the tokenizer's folder has no chat template")
    try:
        return encode_chat(messages)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{where}: {error}") from None


def _are_ids(value: Any, vocab_size: int) -> bool:
    return isinstance(value, list) and all(type(token) is int and 0 <= token < vocab_size for token in value)


def _ended(token_ids: list[int], tokenizer: Tokenizer) -> list[int]:
    return [*token_ids, *tokenizer.eos_token_ids[:1]]
