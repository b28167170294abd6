"""Time the reading of replies by the OpenAI endpoint, and what a long one costs its neighbours.

    python benchmarks/reply_reading.py [--json] [--seconds 4]

First the reader alone: replies of 1,000 to 1,000,000 characters of arguments and of 1,000 to 100,000 markers, in pieces
of four characters, as tokens come, and whole. A cost that grows with the reply would show in the last column.

Then the endpoint in a process of its own, with a client of the server that answers at once: the time of a short chat,
alone and beside another client that asks for long replies, one after the other: 1,000,000 characters of arguments,
100,000 markers, and plain text of the same length, which is what carrying that much costs without reading calls. Whole
replies, and streams of a chunk every millisecond, which is more than any server of this project writes for one client.
"""

import argparse
import asyncio
import bisect
import contextlib
import http.client
import itertools
import json
import multiprocessing
import statistics
import threading
from collections.abc import Iterator
from time import perf_counter
from typing import Any

from kimi_client import Chunk
from kimi_client.aio import AsyncStream
from kimi_client.replies import DeclaredTools, ReplyReader

SECTION_BEGIN, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
TOOLS = [{"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}]
LINE = 'line "quoted" {brace} \\ ü\n'
PIECE_CHARS = 4
STATISTICS = {"num_prompt_tokens": 1, "num_output_tokens": 1, "num_cached_tokens": 0}

Reply = tuple[str, tuple[int, ...]]
"""A text and the offsets of its control tokens."""


def join(pieces: Iterator[str]) -> Reply:
    """Each piece that is a marker is a control token."""
    text, offsets, at = [], [], 0
    for piece in pieces:
        if piece.startswith("<|"):
            offsets.append(at)
        text.append(piece)
        at += len(piece)
    return "".join(text), tuple(offsets)


def long_arguments(num_chars: int) -> Reply:
    arguments = json.dumps({"text": LINE * (num_chars // len(LINE))}, ensure_ascii=False)
    return join(iter([SECTION_BEGIN, BEGIN, "functions.write:0", ARGUMENTS, arguments, END, SECTION_END]))


def many_markers(num_markers: int) -> Reply:
    call = (BEGIN, "functions.write:0", ARGUMENTS, "{}", END)
    return join(piece for _ in range(num_markers // 3) for piece in call)


def plain_text(num_chars: int) -> Reply:
    return LINE * (num_chars // len(LINE)), ()


def time_reader(reply: Reply, piece_chars: int) -> tuple[float, int]:
    """Seconds of reading it, and the number of pieces."""
    text, offsets = reply
    reader = ReplyReader(DeclaredTools(TOOLS, []), begins_thinking=False)
    told, pieces = 0, []
    for start in range(0, len(text), piece_chars):
        first = told
        while told < len(offsets) and offsets[told] < start + piece_chars:
            told += 1
        pieces.append((text[start : start + piece_chars], offsets[first:told]))
    begin = perf_counter()
    for piece, now in pieces:
        reader.feed(piece, now)
    reader.feed("", is_last=True)
    return perf_counter() - begin, len(pieces)


def measure_reader() -> list[dict[str, Any]]:
    replies = {f"{size:,} characters of arguments": long_arguments(size) for size in (10**3, 10**4, 10**5, 10**6)}
    replies |= {f"{count:,} markers": many_markers(count) for count in (10**3, 10**4, 10**5)}
    rows = []
    for name, reply in replies.items():
        for piece_chars in (PIECE_CHARS, len(reply[0])):
            seconds, num_pieces = min(time_reader(reply, piece_chars) for _ in range(3))
            rows.append(
                {
                    "reply": name,
                    "pieces": num_pieces,
                    "ms": 1e3 * seconds,
                    "us_a_piece": 1e6 * seconds / num_pieces,
                    "ns_a_character": 1e9 * seconds / len(reply[0]),
                }
            )
    return rows


REPLIES = {
    "short": ("Hello.", ()),
    "arguments": long_arguments(10**6),
    "markers": many_markers(10**5),
    "text": plain_text(10**6),
}


class InstantStream(AsyncStream):
    def __init__(self, reply: Reply, is_streamed: bool) -> None:
        super().__init__("r", lambda again: None)
        self._reply = reply
        self._piece_chars = 4 * PIECE_CHARS if is_streamed else len(reply[0])

    async def __aiter__(self) -> Any:
        text, offsets = self._reply
        for start in range(0, len(text), self._piece_chars):
            end = start + self._piece_chars
            first, last = bisect.bisect_left(offsets, start), bisect.bisect_left(offsets, end)
            more = {"finish_reason": "stop", "statistics": STATISTICS} if end >= len(text) else {}
            chunk = Chunk(text[start:end], 4, control_offsets=offsets[first:last], **more)
            if end < len(text):
                await asyncio.sleep(0.001)
            else:
                self.chunks.append(chunk)
            yield chunk

    def cancel(self) -> None:
        pass


class InstantClient:
    """A stand-in for the gRPC client: answers with the reply that the last message names."""

    def __init__(self, url: str) -> None:
        pass

    async def __aenter__(self) -> "InstantClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    def stream(self, *, stream: bool, **fields: Any) -> InstantStream:
        return InstantStream(REPLIES[fields["messages"][-1]["content"]], stream)


def run_endpoint(port: Any) -> None:
    import kimi_openai.app
    from kimi_openai import EndpointSettings, make_server, open_socket

    kimi_openai.app.AsyncKimiClient = InstantClient  # type: ignore[misc,assignment]
    with open_socket("127.0.0.1", 0) as listener:
        port.value = listener.getsockname()[1]
        make_server(EndpointSettings()).run(sockets=[listener])


def ask(connection: http.client.HTTPConnection, reply: str, is_over: threading.Event | None = None) -> float:
    """Milliseconds of a chat; a stream, if it may be left before its end."""
    message = {"role": "user", "content": reply}
    body = json.dumps({"messages": [message], "tools": TOOLS, "stream": is_over is not None})
    begin = perf_counter()
    connection.request("POST", "/v1/chat/completions", body)
    response = connection.getresponse()
    assert response.status == 200
    while response.read(65_536):
        if is_over is not None and is_over.is_set():
            connection.close()
            break
    return 1e3 * (perf_counter() - begin)


def measure_neighbours(seconds: float) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    port = context.Value("i", 0)
    process = context.Process(target=run_endpoint, args=(port,), daemon=True)
    process.start()
    try:
        while not port.value:
            process.join(0.05)
        beside = [(None, False), *itertools.product(("text", "arguments", "markers"), (False, True))]
        return [measure_beside(port.value, *disturbance, seconds) for disturbance in beside]
    finally:
        process.terminate()
        process.join()


def measure_beside(port: int, disturbance: str | None, is_streamed: bool, seconds: float) -> dict[str, Any]:
    is_over = threading.Event()

    def disturb() -> None:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            while not is_over.is_set():
                ask(connection, disturbance or "", is_over if is_streamed else None)

    thread = threading.Thread(target=disturb)
    if disturbance is not None:
        thread.start()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        times = [ask(connection, "short")]
        end = perf_counter() + seconds
        while perf_counter() < end:
            times.append(ask(connection, "short"))
    is_over.set()
    if disturbance is not None:
        thread.join()
    deciles = statistics.quantiles(times, n=100)
    name = f"{disturbance}, {'streamed' if is_streamed else 'whole'}" if disturbance else "nothing"
    return {"beside": name, "p50_ms": deciles[49], "p99_ms": deciles[98], "max_ms": max(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=4, help="of each measurement of the endpoint")
    options = parser.parse_args()
    found = {"reader": measure_reader(), "neighbours": measure_neighbours(options.seconds)}
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for row in found["reader"]:
        print(
            f"{row['reply']:>36} {row['pieces']:>9,} pieces {row['ms']:>9.2f} ms"
            f" {row['us_a_piece']:>11.2f} us a piece {row['ns_a_character']:>8.1f} ns a character"
        )
    for row in found["neighbours"]:
        times = f"{row['p50_ms']:.2f} ms, p99 {row['p99_ms']:.2f}, max {row['max_ms']:.2f}"
        print(f"a short chat beside {row['beside']:>20}: {times}")


if __name__ == "__main__":
    main()
