"""Text that the draft guessed is green in a terminal, and the text is the same everywhere."""

import re

from kimi_backend.cli.drafted_text import DraftedText
from kimi_client import Chunk

CHUNKS = [
    Chunk("def", 1, token_origins=(0,), token_offsets=(0,)),
    # The last token's text waits for a stop string; a bracket is no markup, an escape no command to the terminal.
    Chunk(" f([", 3, token_origins=(1, 1, 0), token_offsets=(3, 5, 7)),
    Chunk("red]\x1b[2J)", 1, token_origins=(1,), token_offsets=(11,), finish_reason="stop"),
]


def shown(capsys):
    text = DraftedText()
    for chunk in CHUNKS:
        text.show(chunk)
    return capsys.readouterr().out, text.summary()


def test_a_terminal_shows_guesses_in_green(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    out, summary = shown(capsys)
    assert out == "def\x1b[32m f([\x1b[0mred]\x1b[32m[2J)\x1b[0m"
    assert re.fullmatch(r"5 tokens, \d+ a second, 2.00 a round", summary)


def test_a_pipe_gets_text_alone(capsys, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert shown(capsys)[0] == "def f([red][2J)"
