"""`kimi chat`: a conversation in the terminal, with line editing, a history, and the thoughts dimmed."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from kimi_backend.cli.talk import client_errors, describe_completion, printable, take_ctrl_c
from kimi_client import KimiClient

THINK_BEGIN, THINK_END = "<think>", "</think>"
COMMANDS = {
    "/reset": "forget the conversation",
    "/system TEXT": "another system message, and forget",
    "/retry": "answer the last question again",
    "/help": "this list",
    "/exit": "leave",
}
BANNER = (
    "Enter sends, Alt-Enter begins another line, arrows find earlier ones. Ctrl-C clears a line or stops an answer,"
    " Ctrl-D leaves.\n" + ", ".join(f"{name} {what}" for name, what in COMMANDS.items())
)

_notes = Console(stderr=True, highlight=False)
_answers = Console(highlight=False, soft_wrap=True)

ReadLine = Callable[[], str]
"""Raises EOFError at the end, and KeyboardInterrupt for a line that Ctrl-C cleared."""


@dataclass(slots=True)
class ThoughtSplitter:
    """Cuts a reply, in pieces of any size, into thoughts and answer."""

    is_thinking: bool
    """Kimi's template opens the think block itself, so that a reply begins inside it."""
    _pending: str = ""

    def feed(self, text: str, *, is_last: bool = False) -> Iterator[tuple[str, bool]]:
        """(text, whether it is thought); what may be the beginning of a marker waits."""
        self._pending += text
        while True:
            marker = THINK_END if self.is_thinking else THINK_BEGIN
            before, found, after = self._pending.partition(marker)
            if not found:
                break
            yield before, self.is_thinking
            self._pending, self.is_thinking = after, not self.is_thinking
        sure = len(self._pending) if is_last else _num_sure(self._pending, marker)
        yield self._pending[:sure], self.is_thinking
        self._pending = self._pending[sure:]


def _num_sure(text: str, marker: str) -> int:
    """How many characters belong to no beginning of the marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return len(text) - length
    return len(text)


@dataclass(slots=True)
class Conversation:
    """Messages so far, and how they are sent."""

    client: KimiClient
    fields: dict[str, Any]
    system: str | None
    messages: list[dict[str, str]] = field(default_factory=list)
    is_thinking_asked: bool = True
    thinks: bool = True
    """Whether a reply begins inside a think block; learnt from the last one."""

    def ask(self, question: str) -> None:
        """Stream the answer and keep both; thoughts are not kept, and nothing of an answer that Ctrl-C stops."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        asked = {"role": "user", "content": question}
        splitter = ThoughtSplitter(self.thinks)
        said: list[tuple[str, bool]] = []
        with self.client.stream(messages=[*opening, *self.messages, asked], **self.fields) as stream:
            try:
                for chunk in stream:
                    said += _show(splitter.feed(chunk.text))
                said += _show(splitter.feed("", is_last=True))
            except KeyboardInterrupt:
                stream.cancel()
                _answers.print()
                _notes.print("[yellow]stopped[/yellow]")
                return
            done = stream.result()
        _answers.print()
        _notes.print(f"[dim]{describe_completion(done)}[/dim]")
        # A template that opens no block, or a model that closes none: all of it was the answer.
        self.thinks = self.is_thinking_asked and THINK_END in done.text
        answer = "".join(text for text, is_thought in said if not (is_thought and self.thinks))
        self.messages += [asked, {"role": "assistant", "content": answer.strip()}]

    def reset(self, system: str | None) -> None:
        self.messages, self.system = [], system

    def retry(self) -> None:
        if not self.messages:
            _notes.print("nothing was asked yet")
            return
        question = self.messages[-2]["content"]
        del self.messages[-2:]
        self.ask(question)


def _show(pieces: Iterator[tuple[str, bool]]) -> list[tuple[str, bool]]:
    shown = [(text, is_thought) for text, is_thought in pieces if text]
    for text, is_thought in shown:
        _answers.print(Text(printable(text), style="dim" if is_thought else ""), end="")
    return shown


def line_reader() -> ReadLine:
    """Lines with editing and a history where a person types, plain ones where another program writes."""
    if not sys.stdin.isatty():
        return input
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    folder = Path(typer.get_app_dir("kimi"))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    history = folder / "chat_history"
    history.touch(mode=0o600)
    session: PromptSession[str] = PromptSession(
        history=FileHistory(str(history)),
        key_bindings=keys,
        multiline=True,
        prompt_continuation="  ",
        completer=WordCompleter([name.split()[0] for name in COMMANDS], sentence=True),
        complete_while_typing=False,
    )
    return lambda: session.prompt("> ")


@client_errors()
def chat(url: str, system: str | None, fields: dict[str, Any]) -> None:
    """Read a question, stream the answer, repeat, until Ctrl-D or /exit."""
    take_ctrl_c()
    thinks = (fields.get("chat_template_kwargs") or {}).get("thinking") is not False
    conversation = Conversation(KimiClient(url), fields, system, is_thinking_asked=thinks, thinks=thinks)
    read_line = line_reader()
    _notes.print(f"[dim]{BANNER}[/dim]")
    while True:
        try:
            line = read_line().strip()
            if line == "/exit":
                return
            _obey(conversation, line)
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def _obey(conversation: Conversation, line: str) -> None:
    command, _, rest = line.partition(" ")
    if not line:
        return
    if not line.startswith("/") or "/" in command[1:]:
        conversation.ask(line)
    elif command == "/reset":
        conversation.reset(conversation.system)
    elif command == "/system":
        conversation.reset(rest.strip() or None)
    elif command == "/retry":
        conversation.retry()
    else:
        _notes.print(BANNER if command == "/help" else f"{command} is no command: {', '.join(COMMANDS)}", markup=False)
