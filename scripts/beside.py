"""Times requests alone and beside a client that misbehaves, in turns, so that other work meets both alike."""

import contextlib
import http.client
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_backend.hosting.stubs import find_stubs
from served_load import Served

MB = 10**6
TURNS = 4
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Post:
    """A request with a body, to a port of this machine."""

    port: int
    path: str
    body: bytes

    def send(self) -> tuple[int, float]:
        """Return its status and its seconds; 0 where the connection was lost."""
        begin = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            try:
                connection.request("POST", self.path, self.body, {"Content-Type": "application/json"})
                reply = connection.getresponse()
                reply.read()
                status = reply.status
            except (OSError, http.client.HTTPException):
                status = 0
        return status, time.perf_counter() - begin


def json_post(port: int, path: str, fields: dict[str, Any]) -> Post:
    return Post(port, path, json.dumps(fields).encode())


def _send_again_and_again(post: Post, is_over: Any, replies: Any) -> None:
    found = []
    while not is_over.is_set():
        found.append(post.send())
    replies.put(found)


@contextlib.contextmanager
def sending(post: Post | None) -> Iterator[list[tuple[int, float]]]:
    """Another process sends it again and again, if there is one; what it got is in the list afterwards."""
    found: list[tuple[int, float]] = []
    if post is None:
        yield found
        return
    is_over, replies = _SPAWN.Event(), _SPAWN.Queue()
    process = _SPAWN.Process(target=_send_again_and_again, args=(post, is_over, replies))
    process.start()
    try:
        time.sleep(0.5)  # until it has loaded Python
        yield found
    finally:
        is_over.set()
        found += replies.get()
        process.join()


@dataclass(frozen=True, slots=True)
class Question:
    """A question that is asked again and again, and the one number that its answers come to."""

    ask: Callable[[], float]
    """Returns seconds."""
    sums_up: Callable[[list[float]], float] = statistics.median


def seconds_of(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def ask_in_turns(
    questions: Sequence[Question], disturbances: Sequence[Callable[[], Any]], seconds: float
) -> list[list[float]]:
    """Milliseconds.

    Args:
        disturbances: makers of context managers.
        seconds: for each question under each disturbance, all turns together.

    Returns:
        A row for each disturbance, with a column for each question.
    """
    answers: list[list[list[float]]] = [[[] for _ in questions] for _ in disturbances]
    for _ in range(TURNS):
        for row, disturb in zip(answers, disturbances, strict=True):
            with disturb():
                for column, question in zip(row, questions, strict=True):
                    end = time.perf_counter() + seconds / TURNS
                    column.append(question.ask())
                    while time.perf_counter() < end:
                        column.append(question.ask())
    return [[round(1e3 * q.sums_up(column), 1) for q, column in zip(questions, row, strict=True)] for row in answers]


def resident_mb(served: Served) -> dict[str, float]:
    """Memory of each process of the server."""
    pids = {stub.model: stub.pid for stub in find_stubs(served.prefix)}
    pids["tritonserver"] = served.pid_of("tritonserver")
    return {name: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / MB for name, pid in pids.items()}


def regions_mb(served: Served) -> float:
    return sum(path.stat().st_size for path in Path("/dev/shm").glob(f"{served.prefix}*")) / MB
