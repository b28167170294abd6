"""Reads the JSON files around a tokenizer: tokenizer_config.json, generation_config.json, config.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_backend.config.regular_files import read_regular_text
from kimi_backend.errors import CheckpointError
from kimi_backend.text.special_tokens import AddedToken

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_NAME_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token")
MAX_LISTED_PROBLEMS = 20
MAX_TOKEN_ID = (1 << 24) - 1
"""Well above any vocabulary: every id has a row in the tables of a tokenizer and of what samples from it."""
_MAX_ID_DIGITS = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """tokenizer_config.json, as far as it is data."""

    added_tokens: tuple[AddedToken, ...]
    """Tokens in order of id."""
    special_names: dict[str, str]
    """"bos_token" → "[BOS]" and so on; only those that the file names."""
    chat_templates: dict[str, str]
    """Name → template; one template alone is named "default"."""

    @classmethod
    def from_folder(cls, folder: Path) -> "TokenizerConfig":
        """Reads and checks the file.

        Raises:
            CheckpointError: absent, not JSON, or a field of the wrong shape.
        """
        path = folder / TOKENIZER_CONFIG_FILE
        config = read_json_object(path)
        problems: list[str] = []
        result = cls(
            added_tokens=_added_tokens(config, problems),
            special_names=_special_names(config, problems),
            chat_templates=_chat_templates(config, problems),
        )
        raise_problems(path, problems)
        return result


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: absent, unreadable, not UTF-8, not JSON (with line and column), or not an object.
    """
    try:
        value = json.loads(read_regular_text(path))
    except FileNotFoundError:
        raise CheckpointError(str(path), ["the file does not exist"]) from None
    except OSError as error:
        raise CheckpointError(str(path), [f"cannot be read: {error.strerror or error}"]) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(str(path), [f"byte {error.start} is not UTF-8"]) from error
    except (ValueError, RecursionError) as error:  # ValueError: an integer of more digits than Python converts
        raise CheckpointError(str(path), [f"is not JSON: {error}"]) from error
    if not isinstance(value, dict):
        raise CheckpointError(str(path), [f"holds a {type(value).__name__}; a JSON object is expected"])
    return value


def raise_problems(path: Path, problems: list[str]) -> None:
    """Raise CheckpointError when there are problems; a long list is cut and its rest counted."""
    if len(problems) > MAX_LISTED_PROBLEMS:
        problems = [*problems[:MAX_LISTED_PROBLEMS], f"and {len(problems) - MAX_LISTED_PROBLEMS} more"]
    if problems:
        raise CheckpointError(str(path), problems)


def read_eos_token_ids(folder: Path, tokenizer_eos: int | None, vocab_size: int) -> tuple[int, ...]:
    """The ids that end a reply: generation_config.json's, then config.json's; else the tokenizer's own end of sequence.

    Kimi's first file names <|im_end|>, the end of a turn, and its second [EOS]: a model may end by either.

    Raises:
        CheckpointError: `eos_token_id` is not an id, or a list of ids, below `vocab_size`.
    """
    found: dict[int, None] = {}
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.exists():
            continue
        config = read_json_object(path)
        nested = config.get("text_config")
        if config.get("eos_token_id") is None and isinstance(nested, dict):
            config = nested
        value = config.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not ids or not all(type(token_id) is int and 0 <= token_id < vocab_size for token_id in ids):
            allowed = f"an id from 0 to {vocab_size - 1}, or a list of them"
            raise CheckpointError(str(path), [f"eos_token_id is {value!r}; allowed: {allowed}"])
        found |= dict.fromkeys(ids)
    if not found and tokenizer_eos is not None:
        return (tokenizer_eos,)
    return tuple(found)


def _added_tokens(config: dict[str, Any], problems: list[str]) -> tuple[AddedToken, ...]:
    field = config.get("added_tokens_decoder", {})
    if not isinstance(field, dict):
        problems.append(f"added_tokens_decoder is a {type(field).__name__}; an object of id → token is expected")
        return ()
    tokens: dict[int, AddedToken] = {}
    owners: dict[str, str] = {}
    for key, entry in field.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        is_number = key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS
        if not is_number or int(key) > MAX_TOKEN_ID:
            problems.append(
                f"added_tokens_decoder[{key[:40]!r}]: the key must be a token id, a whole number up to {MAX_TOKEN_ID}"
            )
        elif not isinstance(content, str) or not content:
            problems.append(f"added_tokens_decoder[{key!r}].content is {content!r}; a string with text is expected")
        elif not _is_unicode(content):
            problems.append(f"added_tokens_decoder[{key!r}].content is {content!r}; a lone surrogate is no character")
        elif content in owners:
            problems.append(f"added_tokens_decoder[{key!r}].content {content!r} also belongs to id {owners[content]}")
        elif not isinstance(entry.get("special", False), bool):
            problems.append(f"added_tokens_decoder[{key!r}].special is {entry['special']!r}; true or false is expected")
        elif int(key) in tokens:
            problems.append(f"added_tokens_decoder[{key!r}]: id {int(key)} is there twice")
        else:
            owners[content] = key
            tokens[int(key)] = AddedToken(int(key), content, entry.get("special", False))
    return tuple(tokens[token_id] for token_id in sorted(tokens))


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _special_names(config: dict[str, Any], problems: list[str]) -> dict[str, str]:
    names = {}
    for key in SPECIAL_NAME_KEYS:
        value = config.get(key)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            names[key] = content
        elif content is not None:
            problems.append(f"{key} is {value!r}; a token's text, an object with its content, or null is expected")
    return names


def _chat_templates(config: dict[str, Any], problems: list[str]) -> dict[str, str]:
    field = config.get("chat_template")
    if field is None:
        return {}
    if isinstance(field, str):
        return {"default": field}
    entries = field if isinstance(field, list) else [None]
    templates = {}
    for index, entry in enumerate(entries):
        fields = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not all(isinstance(value, str) for value in fields):
            problems.append(
                f"chat_template[{index}]: a string, or a list of objects with name and template, is expected"
            )
        else:
            templates[str(fields[0])] = str(fields[1])
    return templates
