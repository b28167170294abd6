"""The measurement of replies' reading: its replies, what it feeds of them, and the endpoint's stand-ins."""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import reply_reading
from kimi_client.replies import DeclaredTools, ReplyReader
from reply_reading import ARGUMENTS, BEGIN, END, SECTION_BEGIN, InstantClient, Reply


def test_a_reply_of_long_arguments_is_one_call() -> None:
    text, offsets = reply_reading.long_arguments(1000)
    assert [text[at:].split("|>")[0] + "|>" for at in offsets[:2]] == [SECTION_BEGIN, BEGIN]
    assert len(offsets) == 5
    reader = ReplyReader(DeclaredTools(reply_reading.TOOLS, []), begins_thinking=False)
    reader.feed(text, offsets)
    arguments = text.split(ARGUMENTS)[1].split(END)[0]
    assert 950 < len(json.loads(arguments)["text"]) <= 1000


def test_a_reply_of_markers_and_one_of_plain_text() -> None:
    text, offsets = reply_reading.many_markers(31)
    assert len(offsets) == 30
    assert all(text.startswith("<|tool_call", at) for at in offsets)
    assert text.count("{}") == 10
    text, offsets = reply_reading.plain_text(1000)
    assert (offsets, 950 < len(text) <= 1000) == ((), True)


@pytest.mark.parametrize("piece_chars", [1, 4, 7, 1000])
def test_every_marker_is_fed_with_the_piece_that_it_begins_in(
    piece_chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[tuple[str, tuple[int, ...]]] = []

    class Noting(ReplyReader):
        def feed(self, text: str, offsets: Any = (), *, is_last: bool = False) -> Any:
            fed.append((text, tuple(offsets)))

    monkeypatch.setattr(reply_reading, "ReplyReader", Noting)
    text, offsets = reply_reading.many_markers(6)
    seconds, num_pieces = reply_reading.time_reader((text, offsets), piece_chars)
    assert "".join(piece for piece, _ in fed) == text
    assert [at for _, told in fed for at in told] == list(offsets)
    for index, (_, told) in enumerate(fed[:-1]):
        assert all(index * piece_chars <= at < (index + 1) * piece_chars for at in told)
    assert num_pieces == len(fed) - 1 == -(-len(text) // piece_chars)
    assert seconds >= 0


def test_rows_of_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(3, 1000))
    monkeypatch.setattr(reply_reading, "long_arguments", lambda size: ("x" * 40, ()))
    monkeypatch.setattr(reply_reading, "many_markers", lambda count: ("x" * 40, ()))
    monkeypatch.setattr(reply_reading, "time_reader", lambda reply, chars: (float(next(seconds)), 40 // chars))
    rows = reply_reading.measure_reader()
    assert [row["pieces"] for row in rows] == [10, 1] * 7
    assert rows[0] == {
        "reply": "1,000 characters of arguments",
        "pieces": 10,
        "ms": 3e3,
        "us_a_piece": 3e5,
        "ns_a_character": 3e9 / 40,
    }
    assert rows[1]["ms"] == 6e3


@pytest.mark.parametrize(("is_streamed", "num_chunks"), [(True, 4), (False, 1)])
def test_a_stand_in_answers_whole_or_in_chunks(
    is_streamed: bool, num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply: Reply = ("0123456789abcdef" * 4, (0, 16, 63))
    monkeypatch.setitem(reply_reading.REPLIES, "short", reply)

    async def answer() -> list[Any]:
        async with InstantClient("") as client:
            stream = client.stream(stream=is_streamed, messages=[{"content": "short"}])
            return [chunk async for chunk in stream]

    chunks = asyncio.run(answer())
    assert len(chunks) == num_chunks
    assert "".join(chunk.text for chunk in chunks) == reply[0]
    assert [at for chunk in chunks for at in chunk.control_offsets] == list(reply[1])
    assert [chunk.finish_reason for chunk in chunks] == [None] * (num_chunks - 1) + ["stop"]


class Chat(BaseHTTPRequestHandler):
    """Answers every chat alike."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((body["messages"][0]["content"], body["stream"]))  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Chat) as server:
        server.asked = []  # type: ignore[attr-defined]
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("disturbance", "is_streamed", "name"),
    [(None, False, "nothing"), ("text", True, "text, streamed"), ("markers", False, "markers, whole")],
)
def test_short_chats_are_timed_beside_others(
    endpoint: Any, disturbance: str | None, is_streamed: bool, name: str
) -> None:
    found = reply_reading.measure_beside(endpoint.server_port, disturbance, is_streamed, 0.02)
    assert found["beside"] == name
    assert 0 < found["p50_ms"] <= found["p99_ms"]
    assert found["max_ms"] > 0
    others = {asked for asked in endpoint.asked if asked[0] != "short"}
    assert others <= {(disturbance, is_streamed)}
    assert ("short", False) in endpoint.asked
