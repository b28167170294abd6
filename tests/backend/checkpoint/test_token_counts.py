"""Files of token counts: what is written is read, and what is wrong is said."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from kimi_backend.checkpoint.token_counts import TokenCounts
from kimi_backend.errors import ConfigError

COUNTS = TokenCounts.of({3: 5, 1: 9, 4: 5, 0: 0, 2: 1}, vocab_size=6)


def test_tokens_are_ranked_by_frequency_then_id() -> None:
    assert COUNTS.token_ids == (1, 3, 4, 2)
    assert COUNTS.counts == (9, 5, 5, 1)
    assert COUNTS.ranking() == [1, 3, 4, 2, 0, 5]
    assert [COUNTS.share(size) for size in (0, 1, 3, 6)] == [0, 9 / 20, 19 / 20, 1]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    COUNTS.write(tmp_path / "counts.json")
    assert TokenCounts.read(tmp_path / "counts.json") == COUNTS
    assert json.loads((tmp_path / "counts.json").read_text())["num_tokens"] == 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0, a positive integer"),
        ({"token_ids": [1, 3, 4, 6]}, "distinct ids, each 0 to 5"),
        ({"token_ids": [1, 3, 4, 1]}, "distinct ids"),
        ({"token_ids": [1, 3, 4, True]}, "distinct ids"),
        ({"counts": [9, 5, 5]}, "as long as token_ids"),
        ({"counts": [5, 9, 5, 1]}, "falling integers"),
        ({"counts": [9, 5, 5, 0]}, "at least 1"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = tmp_path / "counts.json"
    COUNTS.write(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        TokenCounts.read(file)


@pytest.mark.parametrize(("content", "message"), [("[1]", "a JSON object is needed"), ("{", "not valid JSON")])
def test_no_json_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "counts.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        TokenCounts.read(tmp_path / "counts.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.json: No such file"):
        TokenCounts.read(tmp_path / "nothing.json")


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "counts.json"
    COUNTS.write(file)

    def write_half(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text[: len(text) // 2].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(ConfigError, match=r"counts\.json: cannot be written: No space left on device"):
        COUNTS.write(file)
    assert TokenCounts.read(file) == COUNTS
    assert list(tmp_path.iterdir()) == [file]
