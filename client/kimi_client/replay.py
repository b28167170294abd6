"""An open-loop load: requests begin when a schedule says so, however many still run.

A closed loop (`kimi_client.load`) waits for a slow server and so hides how long users would wait; this one does not.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_client._errors import KimiClientError
from kimi_client._types import Completion
from kimi_client.aio import AsyncKimiClient
from kimi_client.load import LoadResult, RequestTimes, run_one


@dataclass(frozen=True, slots=True)
class TimedTurn:
    """One request of a session."""

    delay_s: float
    """The pause after the end of the turn before."""
    fields: Callable[[Sequence[Completion]], dict[str, Any]]
    """Its fields (see `KimiClient.stream`), given the completions of the session's earlier turns."""


@dataclass(frozen=True, slots=True)
class TimedSession:
    """Turns one after another, the first of them `start_s` after the replay's start."""

    start_s: float
    turns: tuple[TimedTurn, ...]


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The measurements of a replay."""

    load: LoadResult
    late_s: tuple[float, ...]
    """The delay with which each first turn was sent: of many ms, this machine is too busy to measure with."""
    most_running: int


async def replay(
    url: str, sessions: Sequence[TimedSession], on_done: Callable[[], None] = lambda: None
) -> ReplayResult:
    """Send every session at its time. A turn that fails ends its session.

    Args:
        on_done: called after each request, for a progress bar.
    """
    done: list[RequestTimes] = []
    errors: list[str] = []
    late: list[float] = []
    running, most_running = 0, 0

    async with AsyncKimiClient(url) as client:

        async def run(session: TimedSession) -> None:
            nonlocal running, most_running
            await asyncio.sleep(start + session.start_s - time.perf_counter())
            late.append(time.perf_counter() - start - session.start_s)
            completions: list[Completion] = []
            for turn in session.turns:
                await asyncio.sleep(turn.delay_s)
                running += 1
                most_running = max(most_running, running)
                try:
                    done.append(await run_one(client, turn.fields(completions)))
                    completions.append(done[-1].completion)
                except KimiClientError as error:
                    errors.append(f"{type(error).__name__}: {error}")
                    return
                finally:
                    running -= 1
                    on_done()

        start = time.perf_counter()
        await asyncio.gather(*(run(session) for session in sessions))
        wall_s = time.perf_counter() - start
    return ReplayResult(LoadResult(most_running, wall_s, tuple(done), tuple(errors)), tuple(late), most_running)
