"""`kimi chat`: a conversation in the terminal, with line editing, a history, and the thoughts dimmed."""

import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from kimi_backend.cli.read_beside import read_beside
from kimi_backend.cli.talk import client_errors, describe_completion, printable, take_ctrl_c
from kimi_client import KimiClient
from kimi_client.replies import ContentDelta, Event, ReasoningDelta, ReplyReader

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
"""Raises EOFError at the end, LineCleared for a line that Ctrl-C cleared, and KeyboardInterrupt for a line that Ctrl-C
followed."""


class LineCleared(Exception):
    """Ctrl-C took the line back before Enter sent it."""


@dataclass(slots=True)
class Conversation:
    """Messages so far, and how they are sent."""

    client: KimiClient
    fields: dict[str, Any]
    system: str | None
    messages: list[dict[str, str]] = field(default_factory=list)
    ends_thoughts: bool = True
    """The model ended its thoughts in its last reply; one that does not means all of it as the answer."""

    def ask(self, question: str) -> None:
        """Stream the answer and keep both; thoughts are not kept, and nothing of an answer that Ctrl-C stops."""
        self._ask_after(self.messages, question)

    def _ask_after(self, before: list[dict[str, str]], question: str) -> None:
        """Ask as if only these messages had been said; the conversation changes when all of it is answered."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        asked = {"role": "user", "content": question}
        fields = {**self.fields, "return_control_offsets": True}
        reader: ReplyReader | None = None
        said: list[Event] = []
        messages = [*opening, *before, asked]
        with read_beside(lambda: self.client.stream(messages=messages, **fields)) as reply:
            for chunk in reply:
                reader = reader or ReplyReader(None, begins_thinking=chunk.begins_thinking)
                is_last = chunk.finish_reason is not None
                said += self._show(reader.feed(chunk.text, chunk.control_offsets, is_last=is_last))
        _answers.print()
        _notes.print(f"[dim]{describe_completion(reply.completion)}[/dim]")
        answer = "".join(event.text for event in said if isinstance(event, ContentDelta)).strip()
        thoughts = "".join(event.text for event in said if isinstance(event, ReasoningDelta)).strip()
        self.ends_thoughts = bool(answer) or not thoughts
        self.messages = [*before, asked, {"role": "assistant", "content": answer or thoughts}]

    def _show(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, (ContentDelta, ReasoningDelta)):
                is_thought = isinstance(event, ReasoningDelta) and self.ends_thoughts
                _answers.print(Text(printable(event.text), style="dim" if is_thought else ""), end="")
        return events

    def reset(self, system: str | None) -> None:
        self.messages, self.system = [], system

    def retry(self) -> None:
        if not self.messages:
            _notes.print("nothing was asked yet")
            return
        self._ask_after(self.messages[:-2], self.messages[-2]["content"])


def line_reader() -> ReadLine:
    """Lines with editing and a history where a person types, plain ones where another program writes."""
    if not sys.stdin.isatty():
        return input
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import has_focus
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.keys import Keys

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=has_focus(DEFAULT_BUFFER))
    def _(event: KeyPressEvent) -> None:
        event.app.exit(exception=LineCleared(), style="class:aborting")

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

    def read() -> str:
        # Its own handler of the signal drops one that comes while the prompt ends.
        line = session.prompt("> ", handle_sigint=False)
        # Keys that came behind Enter before the terminal made signals of them.
        keys = [*get_typeahead(session.input), *session.input.read_keys()]
        ends = [at + 1 for at, press in enumerate(keys) if press.key == Keys.ControlC]
        store_typeahead(session.input, keys[ends[-1] if ends else 0 :])
        if ends:
            raise KeyboardInterrupt
        return line

    return read


@contextmanager
def keys_kept_for_the_next_line() -> Iterator[None]:
    """A terminal hands over keys pressed during an answer as they are, where one that edits lines itself would write
    them into the answer and lose Ctrl-D; Ctrl-C stays a signal."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    kept = termios.tcgetattr(sys.stdin)
    kept[tty.IFLAG] &= ~termios.ICRNL
    kept[tty.LFLAG] &= ~(termios.ICANON | termios.ECHO)
    kept[tty.CC][termios.VMIN], kept[tty.CC][termios.VTIME] = 1, 0
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, kept)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


@client_errors()
def chat(url: str, system: str | None, fields: dict[str, Any]) -> None:
    """Read a question, stream the answer, repeat, until Ctrl-D or /exit; Ctrl-C stops what is between two lines."""
    take_ctrl_c()
    conversation = Conversation(KimiClient(url), fields, system)
    read_line = line_reader()
    with keys_kept_for_the_next_line():
        _notes.print(f"[dim]{BANNER}[/dim]")
        _converse(conversation, read_line)


def _converse(conversation: Conversation, read_line: ReadLine) -> None:
    is_stopped = False
    while True:
        try:
            if is_stopped:  # said in here, where Ctrl-C once more does no harm
                _answers.print()
                _notes.print("[yellow]stopped[/yellow]")
                is_stopped = False
            line = read_line().strip()
            if line == "/exit":
                return
            _obey(conversation, line)
        except KeyboardInterrupt:
            is_stopped = True
        except LineCleared:
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
