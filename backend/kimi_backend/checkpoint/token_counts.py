"""The number of times that each token of a vocabulary occurs: what a reduced draft head is chosen by.

The file is JSON: `{"vocab_size": 4096, "num_tokens": 812, "token_ids": [7, 11, …], "counts": [90, 61, …]}`, most
frequent first, tokens that never occurred left out.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from kimi_backend.config.regular_files import read_regular_text
from kimi_backend.errors import ConfigError

TOKEN_COUNTS_FILE = "token_counts.json"
"""Looked for in a draft's folder."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens by falling frequency, the lower id first among equals."""

    vocab_size: int
    token_ids: tuple[int, ...]
    counts: tuple[int, ...]
    """The counts of `token_ids`, each at least 1."""

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @classmethod
    def of(cls, counted: Mapping[int, int], vocab_size: int) -> "TokenCounts":
        """Make them from id -> count; ids must lie in the vocabulary, zeros are left out."""
        ranked = sorted((item for item in counted.items() if item[1]), key=lambda item: (-item[1], item[0]))
        return cls(vocab_size, tuple(token_id for token_id, _ in ranked), tuple(count for _, count in ranked))

    @classmethod
    def read(cls, path: Path) -> "TokenCounts":
        """
        Raises:
            ConfigError: the file cannot be read or is not of this form.
        """
        try:
            data = json.loads(read_regular_text(path))
        except OSError as error:
            raise ConfigError(f"token counts {path}: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"token counts {path}: not valid JSON: {error}") from None
        problem = _problem(data)
        if problem:
            raise ConfigError(f"token counts {path}: {problem}; `kimi count-tokens` writes such a file")
        return cls(data["vocab_size"], tuple(data["token_ids"]), tuple(data["counts"]))

    def write(self, path: Path) -> None:
        """Write the file whole, or leave what was there.

        Raises:
            ConfigError: it cannot be written.
        """
        content = {
            "vocab_size": self.vocab_size,
            "num_tokens": self.num_tokens,
            "token_ids": self.token_ids,
            "counts": self.counts,
        }
        unfinished = path.with_name(f"{path.name}.unfinished")
        try:
            unfinished.write_text(json.dumps(content) + "\n", encoding="utf-8")
            unfinished.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise ConfigError(f"token counts {path}: cannot be written: {error.strerror or error}") from None

    def ranking(self) -> list[int]:
        """Every id of the vocabulary: those counted, then the others by id, since merges learnt first have low ids."""
        seen = set(self.token_ids)
        return [*self.token_ids, *(token_id for token_id in range(self.vocab_size) if token_id not in seen)]

    def share(self, num_tokens: int) -> float:
        """Part of the counted text that its `num_tokens` most frequent tokens make up."""
        return sum(self.counts[:num_tokens]) / max(1, self.num_tokens)


def _problem(data: Any) -> str | None:
    if not isinstance(data, dict):
        return "a JSON object is needed"
    vocab_size, token_ids, counts = (data.get(name) for name in ("vocab_size", "token_ids", "counts"))
    if type(vocab_size) is not int or vocab_size < 1:
        return f"vocab_size is {vocab_size!r}, a positive integer is needed"
    if not _are_integers(token_ids, 0, vocab_size - 1) or len(set(token_ids)) < len(token_ids):
        return f"token_ids must be a list of distinct ids, each 0 to {vocab_size - 1}"
    if not _are_integers(counts, 1, None) or len(counts) != len(token_ids) or sorted(counts, reverse=True) != counts:
        return "counts must be a list as long as token_ids, of falling integers of at least 1"
    return None


def _are_integers(values: Any, minimum: int, maximum: int | None) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        type(value) is int and value >= minimum and (maximum is None or value <= maximum) for value in values
    )
