"""Thoughts are told from answers, answers are kept, and no text steers the terminal."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rich.text
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from kimi_backend.cli import chat
from kimi_backend.cli.talk import printable, take_ctrl_c
from kimi_client import Chunk
from kimi_client._client import Stream


class ScriptedStream(Stream):
    def __init__(self, chunks: list[Chunk]) -> None:
        super().__init__("r1", lambda again: SimpleNamespace(cancel=lambda: None))
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


def test_a_retry_that_is_stopped_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat._answers, "print", lambda *_, **__: None)
    monkeypatch.setattr(chat, "describe_completion", lambda done: "")
    asked: list[list[dict[str, str]]] = []
    replies = [scripted(text, begins_thinking=False) for text in ("one", "two", "lost", "three")]

    class StoppedStream(ScriptedStream):
        def __iter__(self) -> Any:
            for chunk in super().__iter__():
                if len(asked) == 3 and chunk.finish_reason is not None:
                    raise KeyboardInterrupt
                yield chunk

    def stream(messages: list[dict[str, str]], **_: Any) -> ScriptedStream:
        asked.append(messages)
        return StoppedStream(replies.pop(0))

    conversation = chat.Conversation(SimpleNamespace(stream=stream), {}, None)  # type: ignore[arg-type]
    conversation.ask("first")
    conversation.ask("second")
    before = list(conversation.messages)
    with pytest.raises(KeyboardInterrupt):
        conversation.retry()
    assert conversation.messages == before
    conversation.retry()
    assert asked[1] == asked[2] == asked[3]
    assert [message["content"] for message in conversation.messages] == ["first", "one", "second", "three"]


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


def test_an_answer_ends_its_line_and_a_stopped_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[Any] = []
    monkeypatch.setattr(chat._answers, "print", lambda *texts, **_: printed.extend(texts or ["\n"]))
    monkeypatch.setattr(chat._notes, "print", lambda *texts, **_: printed.extend(texts))
    client = SimpleNamespace(stream=lambda **_: ScriptedStream(scripted("Yes", begins_thinking=False)))
    conversation = chat.Conversation(client, {}, None)  # type: ignore[arg-type]
    conversation.ask("?")
    assert printed[-2:] == ["\n", "[dim]1 tokens, 1.0 tokens/s, finish: stop, seed 1[/dim]"]

    def ask(question: str) -> None:
        raise KeyboardInterrupt

    printed.clear()
    lines = iter(["?", "/exit"])
    chat._converse(SimpleNamespace(ask=ask), lambda: next(lines))  # type: ignore[arg-type]
    assert printed == ["\n", "[yellow]stopped[/yellow]"]


def test_commands_are_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(chat._notes, "print", lambda text, **_: said.append(text))
    asked: list[str] = []
    conversation = chat.Conversation(SimpleNamespace(), {}, "old")  # type: ignore[arg-type]
    monkeypatch.setattr(chat.Conversation, "_ask_after", lambda self, before, question: asked.append(question))
    lines = iter(["", "hi", "/usr/bin is a folder", "/retry", "/help", "/nothing", "/system  be brief ", "/exit"])
    conversation.messages = [{"content": "first"}, {"content": "one"}]
    chat._converse(conversation, lambda: next(lines).strip())
    assert asked == ["hi", "/usr/bin is a folder", "first"]
    assert said[0] == chat.BANNER and said[1].startswith("/nothing is no command: /reset, ")
    assert (conversation.messages, conversation.system) == ([], "be brief")
    conversation.messages = [{"content": "first"}, {"content": "one"}]
    for line, system in {"/reset": "be brief", "/system": None}.items():
        chat._obey(conversation, line)
        assert (conversation.messages, conversation.system) == ([], system)
    chat._obey(conversation, "/retry")
    assert said[-1] == "nothing was asked yet"


def test_a_system_message_and_fields_go_with_every_question() -> None:
    asked: list[dict[str, Any]] = []

    def stream(**fields: Any) -> ScriptedStream:
        asked.append(fields)
        return ScriptedStream(scripted("Yes", begins_thinking=False))

    chat.Conversation(SimpleNamespace(stream=stream), {"seed": 2}, "be brief").ask("?")  # type: ignore[arg-type]
    assert asked == [
        {
            "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "?"}],
            "seed": 2,
            "return_control_offsets": True,
        }
    ]


def test_what_steers_a_terminal_is_shown_and_not_obeyed() -> None:
    assert printable("a\x1b[2Jb\n\tc\r\x9b模") == "a\\x1b[2Jb\n\tc\\r\\x9b模"


@pytest.mark.parametrize("moment", ["line", "request", "chunk", "last chunk", "note"])
def test_ctrl_c_stops_what_is_between_two_lines_and_says_so(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = {moment, "chunk"} if moment == "note" else {moment}
    notes: list[str] = []
    lines = ["first", "second"]

    def reach(now: str) -> None:
        if now in moments:
            moments.remove(now)
            signal.raise_signal(signal.SIGINT)

    class InterruptedStream(ScriptedStream):
        def __iter__(self) -> Any:
            for chunk in super().__iter__():
                reach("last chunk" if chunk.finish_reason else "chunk")
                yield chunk

    def stream(**_: Any) -> ScriptedStream:
        reach("request")
        return InterruptedStream(scripted("Yes.", begins_thinking=False))

    def read_line() -> str:
        if not lines:
            raise EOFError
        line = lines.pop(0)
        reach("line")
        return line

    def note(text: str, **_: Any) -> None:
        if "stopped" in text:
            reach("note")
        notes.append(text)

    monkeypatch.setattr(chat, "KimiClient", lambda url: SimpleNamespace(stream=stream))
    monkeypatch.setattr(chat, "line_reader", lambda: read_line)
    monkeypatch.setattr(chat._notes, "print", note)
    monkeypatch.setattr(chat._answers, "print", lambda *_, **__: None)
    monkeypatch.setattr(chat, "describe_completion", lambda done: "answered")
    chat.chat("localhost:1", None, {})
    assert not moments
    assert ["stopped" in text for text in notes[1:]] == [True, False], "the first one stopped, the second one answered"


class Screen(DummyOutput):
    """A terminal that is written to; at one of the writes something happens."""

    def __init__(self, at: int, happen: Callable[[], None]) -> None:
        self._left, self._happen = at, happen

    def flush(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._happen()


@contextmanager
def typing(text: str, screen: DummyOutput, folder: Path) -> Iterator[chat.ReadLine]:
    """Lines that are read from this text."""
    with pytest.MonkeyPatch.context() as patch, create_pipe_input() as keys, create_app_session(keys, screen):
        patch.setattr(sys.stdin, "isatty", lambda: True)
        patch.setattr(chat.typer, "get_app_dir", lambda name: str(folder))
        patch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")
        keys.send_text(text)
        yield chat.line_reader()


def test_ctrl_c_that_was_typed_behind_enter_belongs_to_the_line(tmp_path: Path) -> None:
    with typing("half\x03one\rlost\x03two\r", DummyOutput(), tmp_path) as read_line:
        with pytest.raises(chat.LineCleared):
            read_line()
        with pytest.raises(KeyboardInterrupt):
            read_line()
        assert read_line() == "two"


def test_no_signal_is_lost_while_a_line_is_read(tmp_path: Path) -> None:
    sent: list[int] = []
    taken: list[int] = []
    take_ctrl_c()
    for write in range(1, 20):

        def interrupt(write: int = write) -> None:
            sent.append(write)
            signal.raise_signal(signal.SIGINT)

        try:
            with typing("one\r", Screen(write, interrupt), tmp_path) as read_line:
                read_line()
        except KeyboardInterrupt:
            taken.append(write)
    assert sent == taken
    assert 3 < len(sent) < 19, "every write of a line, from the first to the last"
