"""Request traces: Mooncake's public JSON lines, and sessions of several turns as AIPerf writes them.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, …]}
    {"session_id": "a", "timestamp": 100, "input_length": 300, "output_length": 40}
    {"session_id": "a", "delay": 2000, "input_length": 50, "output_length": 40}

`timestamp` and `delay` are milliseconds: since the trace's start, and since the end of the session's turn before.
`input_length` is in tokens, of a later turn those that the turn adds. A hash id stands for a block of prompt tokens
(512 in Mooncake's traces): equal leading ids are an equal prefix. A line alone in its session may have `text_input`,
the prompt itself, in place of `input_length`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_backend.errors import InvalidRequestError

MOONCAKE_BLOCK = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request."""

    input_length: int
    """Tokens; 0 where `text` is the prompt."""
    output_length: int
    hash_ids: tuple[int, ...] = ()
    delay_s: float = 0.0
    """Between the end of the turn before and this one; of a first turn 0."""
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow one another; a Mooncake line is a session of one."""

    start_s: float
    turns: tuple[Turn, ...]


def read_trace(path: Path, limit: int | None = None) -> list[Session]:
    """All sessions, by the time at which they begin.

    Args:
        limit: so many lines at most.

    Raises:
        InvalidRequestError: the file cannot be read or a line is wrong; names the line.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise InvalidRequestError(f"trace {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"trace {path}: byte {error.start} is not UTF-8") from None
    starts: dict[Any, float] = {}
    turns: dict[Any, list[Turn]] = {}
    for number, line in enumerate(lines[:limit], 1):
        where = f"{path}:{number}"
        entry = _entry(line, where)
        session = ("session", entry["session_id"]) if entry.get("session_id") is not None else ("line", number)
        if session not in turns:
            starts[session] = _number(entry, "timestamp", where) / 1e3
            turns[session] = []
        turns[session].append(_turn(entry, where, is_first=not turns[session]))
        if len(turns[session]) > 1 and any(turn.text is not None for turn in turns[session]):
            raise InvalidRequestError(f"{where}: text_input in a session of several turns, which need input_length")
    if not turns:
        raise InvalidRequestError(f"trace {path}: no requests in it")
    first = min(starts.values())
    sessions = [Session(starts[name] - first, tuple(each)) for name, each in turns.items()]
    return sorted(sessions, key=lambda session: session.start_s)


def _entry(line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(entry, dict):
        raise InvalidRequestError(f"{where}: {line[:80]} given, a JSON object is needed")
    return entry


def _number(entry: dict[str, Any], name: str, where: str, default: float | None = None) -> float:
    value = entry.get(name, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e12:
        raise InvalidRequestError(f"{where}: {name} is {value!r}, a number of milliseconds is needed")
    return float(value)


def _length(entry: dict[str, Any], name: str, where: str) -> int:
    value = entry.get(name)
    if type(value) is not int or not 1 <= value <= 10_000_000:
        raise InvalidRequestError(f"{where}: {name} is {value!r}, a number of tokens is needed")
    return value


def _turn(entry: dict[str, Any], where: str, *, is_first: bool) -> Turn:
    ids = entry.get("hash_ids") or []
    if not isinstance(ids, list) or not all(type(hash_id) is int for hash_id in ids):
        raise InvalidRequestError(f"{where}: hash_ids is {str(ids)[:80]}, a list of integers is needed")
    text = entry.get("text_input")
    if text is not None and (not isinstance(text, str) or not text):
        raise InvalidRequestError(f"{where}: text_input is {str(text)[:80]!r}, a text is needed")
    return Turn(
        input_length=_length(entry, "input_length", where) if text is None else 0,
        text=text,
        output_length=_length(entry, "output_length", where),
        hash_ids=tuple(ids),
        delay_s=0.0 if is_first else _number(entry, "delay", where, 0.0) / 1e3,
    )
