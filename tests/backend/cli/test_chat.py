"""Thoughts are told from answers, answers are kept, and no text steers the terminal."""

from types import SimpleNamespace
from typing import Any

import pytest
import rich.text

from kimi_backend.cli import chat
from kimi_backend.cli.talk import printable
from kimi_client import Chunk
from kimi_client._client import Stream


class ScriptedStream(Stream):
    def __init__(self, chunks: list[Chunk]) -> None:
        super().__init__("r1", lambda again: None)
        self._scripted = chunks

    def __iter__(self) -> Any:
        for chunk in self._scripted:
            self.chunks.append(chunk)
            self._is_open = chunk.finish_reason is None
            yield chunk
        self._scripted = []


def scripted(text: str, *, begins_thinking: bool) -> list[Chunk]:
    """A reply in pieces of three characters, whose think markers are control tokens."""
    offsets = tuple(text.find(marker) for marker in ("<think>", "</think>") if marker in text)
    statistics = {"speculative_decoding": None, "total_time_s": 1.0, "seed": 1, "num_output_tokens": 3}
    head = Chunk("", 0, control_offsets=offsets, begins_thinking=begins_thinking)
    pieces = [Chunk(text[at : at + 3], 1) for at in range(0, len(text), 3)]
    return [head, *pieces, Chunk("", 0, finish_reason="stop", statistics=statistics)]


@pytest.mark.parametrize(
    ("text", "begins_thinking", "dim", "kept"),
    [
        ("I think.</think>Yes.", True, "I think.", "Yes."),
        ("</think>Yes.", True, "", "Yes."),
        ("Yes.", False, "", "Yes."),
        ("<think>hm</think>Yes <thinking>.", False, "hm", "Yes <thinking>."),
        ("all thoughts", True, "all thoughts", "all thoughts"),
    ],
)
def test_thoughts_are_dim_and_answers_kept(
    text: str, begins_thinking: bool, dim: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[rich.text.Text] = []
    monkeypatch.setattr(chat._answers, "print", lambda *texts, **_: shown.extend(texts))
    monkeypatch.setattr(chat, "describe_completion", lambda done: "")
    asked: list[dict[str, Any]] = []

    def stream(**fields: Any) -> ScriptedStream:
        asked.append(fields)
        return ScriptedStream(scripted(text, begins_thinking=begins_thinking))

    conversation = chat.Conversation(SimpleNamespace(stream=stream), {}, None)  # type: ignore[arg-type]
    conversation.ask("?")
    assert "".join(part.plain for part in shown if part.style == "dim") == dim
    conversation.ask("again?")
    assert asked[1]["messages"] == [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": kept},
        {"role": "user", "content": "again?"},
    ]


def test_a_model_that_never_ends_its_thoughts_is_not_dimmed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[rich.text.Text] = []
    monkeypatch.setattr(chat._answers, "print", lambda *texts, **_: shown.extend(texts))
    monkeypatch.setattr(chat, "describe_completion", lambda done: "")
    client = SimpleNamespace(stream=lambda **_: ScriptedStream(scripted("hello", begins_thinking=True)))
    conversation = chat.Conversation(client, {}, None)  # type: ignore[arg-type]
    for style in ("dim", ""):
        shown.clear()
        conversation.ask("?")
        assert {part.style for part in shown} == {style}


def test_what_steers_a_terminal_is_shown_and_not_obeyed() -> None:
    assert printable("a\x1b[2Jb\n\tc\r\x9b模") == "a\\x1b[2Jb\n\tc\\r\\x9b模"
