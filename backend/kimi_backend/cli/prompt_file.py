"""Prompts of a benchmark out of a file of JSON lines."""

import json
from pathlib import Path

from kimi_backend.errors import InvalidRequestError
from kimi_backend.text.tokenizer import Tokenizer

_NEEDED = "a JSON object with prompt (text) or input_ids (token ids) is needed"


def read_prompt_token_ids(path: Path, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Token ids of every line's prompt; special tokens in a text are encoded as plain text.

    Raises:
        InvalidRequestError: the file cannot be read or a line is wrong; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidRequestError(f"prompts {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"prompts {path}: byte {error.start} is not UTF-8") from None
    prompts = [_parse_line(line, f"{path}:{number}", tokenizer) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InvalidRequestError(f"prompts {path}: no prompts in it; on each line {_NEEDED}")
    return prompts


def _parse_line(line: str, where: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where}: not valid JSON: {error}") from None
    if isinstance(entry, dict):
        text, token_ids = entry.get("prompt"), entry.get("input_ids")
        if isinstance(text, str) and token_ids is None:
            return tuple(tokenizer.encode(text))
        if isinstance(token_ids, list) and all(type(t) is int for t in token_ids) and text is None:
            return tuple(token_ids)
    raise InvalidRequestError(f"{where}: {line[:80]} given, {_NEEDED}")
