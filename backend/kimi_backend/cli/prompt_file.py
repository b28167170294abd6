"""Prompts to measure with: out of a file of JSON lines, or a few that are built in."""

import json
from pathlib import Path
from typing import Any

from kimi_backend.errors import InvalidRequestError
from kimi_backend.text.sample_prompts import SAMPLE_PROMPTS
from kimi_backend.text.tokenizer import Tokenizer

_FIELDS = {"prompt": "text_input", "messages": "messages", "input_ids": "input_ids"}
_NEEDED = "a JSON object with prompt (text), messages (a list) or input_ids (token ids) is needed"


def read_prompts(path: Path | None) -> list[dict[str, Any]]:
    """Every line's prompt as the field of a request: text_input, messages or input_ids.

    Args:
        path: None takes the built-in prompts.

    Raises:
        InvalidRequestError: the file cannot be read or a line is wrong; names the line.
    """
    if path is None:
        return [{"text_input": prompt} for prompt in SAMPLE_PROMPTS]
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidRequestError(f"prompts {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"prompts {path}: byte {error.start} is not UTF-8") from None
    prompts = [_parse_line(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InvalidRequestError(f"prompts {path}: no prompts in it; on each line {_NEEDED}")
    return prompts


def read_prompt_token_ids(path: Path | None, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Read them as token ids, for models without a server; special tokens in a text are encoded as plain text.

    Raises:
        InvalidRequestError: as `read_prompts`, and for messages, which only a server makes a prompt of.
    """
    token_ids = []
    for number, prompt in enumerate(read_prompts(path), 1):
        if "messages" in prompt:
            raise InvalidRequestError(f"prompts {path}: prompt {number} has messages, which go to a server only")
        text = prompt.get("text_input")
        token_ids.append(tuple(prompt["input_ids"] if text is None else tokenizer.encode(text)))
    return token_ids


def _parse_line(line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where}: not valid JSON: {error}") from None
    given = [name for name in _FIELDS if isinstance(entry, dict) and entry.get(name) is not None]
    if len(given) == 1 and _fits(given[0], entry[given[0]]):
        return {_FIELDS[given[0]]: entry[given[0]]}
    raise InvalidRequestError(f"{where}: {line[:80]} given, {_NEEDED}")


def _fits(name: str, value: Any) -> bool:
    if name == "prompt":
        return isinstance(value, str)
    return isinstance(value, list) and (name == "messages" or all(type(token_id) is int for token_id in value))
