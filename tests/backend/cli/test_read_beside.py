"""Ctrl-C never finds the connection at work: whatever a reply needs of it is done on other threads."""

import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kimi_backend.cli import talk
from kimi_backend.cli.read_beside import read_beside
from kimi_client import Chunk, ServerFailed
from kimi_client._client import Stream
from support.waiting import PATIENCE_S, wait_for

END = Chunk("b", 1, finish_reason="stop", statistics={"num_output_tokens": 2})


class ScriptedStream(Stream):
    """Gives its chunks, then waits until it is cancelled, unless one of them was the last."""

    def __init__(self, *chunks: Chunk | Exception) -> None:
        self.threads = {threading.current_thread()}
        self.is_cancelled = threading.Event()
        self._scripted = chunks
        self.chunks = []

    def __iter__(self) -> Iterator[Chunk]:
        self.threads.add(threading.current_thread())
        for chunk in self._scripted[len(self.chunks) :]:
            if isinstance(chunk, Exception):
                raise chunk
            self.chunks.append(chunk)
            yield chunk
        if not self.chunks or self.chunks[-1].finish_reason is None:
            self.is_cancelled.wait(PATIENCE_S)

    def cancel(self) -> None:
        self.threads.add(threading.current_thread())
        self.is_cancelled.set()


def test_chunks_and_the_whole_come_over() -> None:
    with read_beside(lambda: ScriptedStream(Chunk("a", 1), END)) as reply:
        assert [chunk.text for chunk in reply] == ["a", "b"]
    assert (reply.completion.text, reply.completion.finish_reason) == ("ab", "stop")


def test_an_error_comes_over() -> None:
    with read_beside(lambda: ScriptedStream(Chunk("a", 1), ServerFailed("oops"))) as reply:
        chunks = iter(reply)
        assert next(chunks).text == "a"
        with pytest.raises(ServerFailed, match="oops"):
            next(chunks)


def interrupted(made: list[ScriptedStream]) -> None:
    def start() -> ScriptedStream:
        made.append(ScriptedStream(Chunk("a", 1)))
        return made[-1]

    with read_beside(start) as reply:
        assert next(iter(reply)).text == "a"
        raise KeyboardInterrupt


def test_whoever_is_interrupted_ends_the_request_from_another_thread() -> None:
    made: list[ScriptedStream] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(made)
    wait_for(made[0].is_cancelled.is_set)
    assert threading.main_thread() not in made[0].threads


def test_a_request_that_is_left_before_it_is_sent_is_ended_then() -> None:
    made: list[ScriptedStream] = []
    is_left = threading.Event()

    def start() -> ScriptedStream:
        assert is_left.wait(PATIENCE_S)
        made.append(ScriptedStream(Chunk("a", 1)))
        return made[-1]

    with read_beside(start) as reply:
        pass
    is_left.set()
    reply.thread.join(PATIENCE_S)
    assert made[0].is_cancelled.is_set()
    assert made[0].chunks == []


def test_one_json_object_is_read_on_another_thread_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = list[ScriptedStream]()

    def stream(**_: Any) -> ScriptedStream:
        made.append(ScriptedStream(Chunk("a", 1), END))
        return made[-1]

    monkeypatch.setattr(talk, "KimiClient", lambda _: SimpleNamespace(stream=stream))
    monkeypatch.setattr(talk, "take_ctrl_c", lambda: None)
    talk.generate("nowhere:1", "?", {}, as_json=True)
    assert json.loads(capsys.readouterr().out)["text"] == "ab"
    assert threading.main_thread() not in made[0].threads
