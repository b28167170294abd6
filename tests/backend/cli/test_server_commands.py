"""The commands around a server hand on what was given and nothing else."""

from typing import Any

import pytest
from typer.testing import CliRunner

from kimi_backend.cli import talk
from kimi_backend.cli.demo import PROMPT
from kimi_backend.cli.main import app
from kimi_client import Chunk, Completion, KimiClientError


def kimi(*words: str, text: str = "") -> int:
    return CliRunner().invoke(app, [*words], input=text, catch_exceptions=False).exit_code


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(talk, "generate", lambda *given, as_json: calls.append((*given, as_json)))
    return calls


def test_generate_sends_what_was_given(generated: list[tuple[Any, ...]]) -> None:
    kimi("generate", "def")
    kimi("generate", "-", "--url=host:1", "--stop=a", "--stop=b", "--temperature=0", "--json", text="from a pipe")
    assert generated == [
        ("localhost:8001", "def", {"max_tokens": 128}, False),
        (
            "host:1",
            "from a pipe",
            {"max_tokens": 128, "temperature": 0.0, "stop": ["a", "b"], "return_token_ids": True},
            True,
        ),
    ]


def test_chat_sends_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr("kimi_backend.cli.chat.chat", lambda *given: calls.append(given))
    kimi("chat")
    kimi("chat", "--system=be brief", "--no-thinking", "--top-p=0.5", "--seed=0")
    assert calls == [
        ("localhost:8001", None, {"max_tokens": 512}),
        (
            "localhost:8001",
            "be brief",
            {"max_tokens": 512, "top_p": 0.5, "seed": 0, "chat_template_kwargs": {"thinking": False}},
        ),
    ]


def test_demo_runs_its_own_prompt_or_another_and_ends_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr("kimi_backend.cli.demo.run_demo", lambda **given: calls.append(given) or 1)
    assert kimi("demo") == 1
    assert kimi("demo", "--prompt=", "-k", "2", "--temperature=0", "--in-process", "--proposer=lookup") == 1
    assert calls == [
        {
            "prompt": PROMPT,
            "max_tokens": 96,
            "num_speculative_tokens": 3,
            "temperature": 0.6,
            "is_in_process": False,
            "proposer": "eagle3",
        },
        {
            "prompt": "",
            "max_tokens": 96,
            "num_speculative_tokens": 2,
            "temperature": 0.0,
            "is_in_process": True,
            "proposer": "lookup",
        },
    ]


class OneReply:
    """A reply whose chunks are there; one may be an interruption."""

    def __init__(self, *chunks: Chunk | BaseException) -> None:
        self._chunks = chunks
        self.completion = Completion(
            text="ab", finish_reason="stop", stop_reason="s", num_output_tokens=2, token_ids=(1, 2), logprobs=(),
            statistics={"seed": 1},
        )  # fmt: skip

    def __enter__(self) -> "OneReply":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Any:
        for chunk in self._chunks:
            if isinstance(chunk, BaseException):
                raise chunk
            yield chunk


CHUNKS = (Chunk("a\x1b", 1), Chunk("b", 1, finish_reason="stop"))


def reply_with(monkeypatch: pytest.MonkeyPatch, *chunks: Chunk | BaseException) -> None:
    monkeypatch.setattr(talk, "take_ctrl_c", lambda: None)
    monkeypatch.setattr(talk, "read_beside", lambda start: OneReply(*chunks))


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, "a\\x1bb\n"), (False, "a\x1bb\n")])
def test_text_goes_out_as_it_comes_and_steers_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool, shown: str
) -> None:
    reply_with(monkeypatch, *CHUNKS)
    monkeypatch.setattr(talk.sys.stdout, "isatty", lambda: is_terminal)
    talk.generate("localhost:1", "?", {}, as_json=False)
    out, said = capsys.readouterr()
    assert (out, said) == (shown, "2 tokens, finish: stop, seed 1\n")


def test_a_cancelled_reply_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reply_with(monkeypatch, CHUNKS[1], KeyboardInterrupt())
    talk.generate("localhost:1", "?", {}, as_json=False)
    assert capsys.readouterr() == ("b\n", "cancelled\n")


def test_a_reply_as_json_is_all_of_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reply_with(monkeypatch, *CHUNKS)
    talk.generate("localhost:1", "?", {}, as_json=True)
    assert capsys.readouterr().out == (
        '{"text": "ab", "finish_reason": "stop", "stop_reason": "s", "token_ids": [1, 2], "statistics": {"seed": 1}}\n'
    )


def test_a_clients_error_is_the_command_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    reply_with(monkeypatch, KimiClientError("it is full"))
    with pytest.raises(talk.KimiError, match="it is full"):
        talk.generate("localhost:1", "?", {}, as_json=False)
