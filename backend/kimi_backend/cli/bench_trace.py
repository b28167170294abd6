"""`kimi bench --trace`: a recorded load sent at its own times, and how many requests came within what users bear."""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kimi_backend.cli.acceptance import acceptance_kind
from kimi_backend.cli.talk import client_errors
from kimi_backend.cli.trace_file import Session, Turn
from kimi_backend.cli.trace_prompts import PromptPool, sample_pool
from kimi_backend.errors import KimiError
from kimi_client import Completion, KimiClient
from kimi_client.load import RequestTimes, percentiles
from kimi_client.replay import ReplayResult, TimedSession, TimedTurn, replay

LATE_MS = 50.0
"""Requests that are sent so much later than scheduled measure this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The milliseconds that a user bears; None: anything."""

    first_token_ms: float | None = None
    inter_token_ms: float | None = None
    request_ms: float | None = None

    def broken_by(self, request: RequestTimes) -> list[str]:
        """The limits that a request does not keep."""
        seconds = {
            "first_token_ms": request.first_token_s,
            "inter_token_ms": request.inter_token_s,
            "request_ms": request.total_s,
        }
        return [
            name
            for name, value in seconds.items()
            if getattr(self, name) is not None and value is not None and 1e3 * value > getattr(self, name)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLoad:
    """A trace and how it is sent."""

    url: str
    sessions: Sequence[Session]
    fields: dict[str, Any]
    """Sampling fields of every request; `seed` is raised by one from request to request."""
    rate_scale: float = 1.0
    """2 sends twice as fast."""
    length_scale: float = 1.0
    """0.1 makes inputs, outputs and prefix blocks a tenth as long."""
    block_size: int = 512
    limits: Limits = field(default_factory=Limits)

    @property
    def num_requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    def scaled(self, length: int) -> int:
        return max(1, round(length * self.length_scale))


def _fields(
    load: TraceLoad, pool: PromptPool | None, turns: Sequence[Turn], index: int, first: int, done: Sequence[Completion]
) -> dict[str, Any]:
    """A turn's request: all that was said in the session, and the tokens that it adds."""
    turn = turns[index]
    seed = load.fields.get("seed")
    fields = load.fields | {"max_tokens": load.scaled(turn.output_length), "ignore_eos": True}
    if seed is not None:
        fields["seed"] = seed + first + index
    if turn.text is not None:
        return fields | {"text_input": turn.text}
    assert pool is not None
    prompt: list[int] = []
    for number in range(index + 1):
        own = replace(turns[number], input_length=load.scaled(turns[number].input_length))
        prompt += pool.prompt(own, f"request {first + number}")
        if number < index:
            prompt += done[number].token_ids
    return fields | {"input_ids": prompt, "return_token_ids": len(turns) > 1}


def _timed(load: TraceLoad, pool: PromptPool | None) -> list[TimedSession]:
    sessions, first = [], 0
    for session in load.sessions:
        turns = tuple(
            TimedTurn(turn.delay_s / load.rate_scale, partial(_fields, load, pool, session.turns, index, first))
            for index, turn in enumerate(session.turns)
        )
        sessions.append(TimedSession(session.start_s / load.rate_scale, turns))
        first += len(session.turns)
    return sessions


@client_errors()
def bench_trace(load: TraceLoad) -> tuple[dict[str, Any], ReplayResult]:
    """Replay the trace. Returns the report and every request's times.

    Raises:
        KimiError: nothing answers, or no request came to its end.
    """
    # It finds prompts of its own requests in the prefix cache, and none of an earlier replay's.
    load = replace(load, fields=load.fields | {"cache_salt": uuid.uuid4().hex})
    console = Console(stderr=True)
    with KimiClient(load.url) as client, console.status("having the model write text for the prompts ..."):
        needs_text = any(turn.text is None for session in load.sessions for turn in session.turns)
        if needs_text:
            pool = sample_pool(client, load.scaled(load.block_size))
        else:
            pool = None
            client.generate(text_input="def ", max_tokens=8)  # warms up
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("requests", total=load.num_requests)
        result = asyncio.run(replay(load.url, _timed(load, pool), lambda: progress.advance(task)))
    if not result.load.requests:
        raise KimiError(f"no request of the trace came to its end: {result.load.errors[0]}")
    return _report(load, result), result


def _report(load: TraceLoad, result: ReplayResult) -> dict[str, Any]:
    requests = result.load.requests
    statistics = [request.completion.statistics for request in requests]
    prompt_tokens = sum(each["num_prompt_tokens"] for each in statistics)
    report = result.load.summary()
    del report["concurrency"]
    return report | {
        "acceptance": acceptance_kind(report.get("pretences", ())),
        "trace_requests": load.num_requests,
        "sessions": len(load.sessions),
        "rate_scale": load.rate_scale,
        "length_scale": load.length_scale,
        "most_running": result.most_running,
        "late_ms": percentiles(result.late_s),
        "prompt_tokens": prompt_tokens,
        "output_tokens": sum(request.completion.num_output_tokens for request in requests),
        "cached_prompt_share": round(sum(each["num_cached_tokens"] for each in statistics) / max(prompt_tokens, 1), 4),
        "goodput": _goodput(load, result),
        "first_error": result.load.errors[0] if result.load.errors else None,
    }


def _goodput(load: TraceLoad, result: ReplayResult) -> dict[str, Any]:
    """Requests within all limits: a second, and of all that the trace has; and how many broke each."""
    broken = [load.limits.broken_by(request) for request in result.load.requests]
    good = sum(not each for each in broken)
    limits = {
        name: getattr(load.limits, name)
        for name in ("first_token_ms", "inter_token_ms", "request_ms")
        if getattr(load.limits, name) is not None
    }
    return {
        "limits": limits,
        "requests_per_second": round(good / result.load.wall_s, 4),
        "share": round(good / load.num_requests, 4),
        "broken": {name: sum(name in each for each in broken) for name in limits},
    }


def print_trace_table(report: dict[str, Any]) -> None:
    """The report as a table on stderr."""
    table = Table(title=f"kimi bench --trace, acceptance {report['acceptance']}")
    for column in ("", "p50", "p90", "p95", "p99"):
        table.add_column(column, justify="right")
    for key in ("first_token_ms", "inter_token_ms", "request_ms", "late_ms"):
        values = report[key] or {}
        table.add_row(key, *(f"{values[p]:,.1f}" if p in values else "-" for p in ("p50", "p90", "p95", "p99")))
    console = Console(stderr=True)
    console.print(table)
    speculation = report["speculation"]
    accepted = f"acceptance length {speculation['acceptance_length']}" if speculation else "no speculation"
    goodput = report["goodput"]
    within = ", ".join(f"{name} ≤ {value:g}" for name, value in goodput["limits"].items()) or "no limits given"
    console.print(
        f"{report['requests']} of {report['trace_requests']} requests in {report['wall_s']:g} s, at most"
        f" {report['most_running']} at once; {report['output_tokens_per_second']:g} output tokens/s; {accepted};"
        f" {report['cached_prompt_share']:.0%} of prompt tokens cached"
    )
    console.print(f"goodput ({within}): {goodput['share']:.1%}, {goodput['requests_per_second']:g} requests/s")
    if report["first_error"] is not None:
        console.print(f"[red]{report['errors']} failed, the first with:[/red] {report['first_error']}")
    if (report["late_ms"] or {}).get("p95", 0) > LATE_MS:
        console.print("[yellow]requests were sent late: this machine is too busy to measure with")


def write_trace_plot(report: dict[str, Any], result: ReplayResult, limits: Limits, path: Path) -> None:
    """The share of requests within each time, for three times, and the limits.

    Raises:
        InvalidRequestError: matplotlib is not installed.
    """
    from kimi_backend.cli.plots import new_figure

    figure = new_figure(figsize=(11, 3.5))
    times: dict[str, Callable[[RequestTimes], float | None]] = {
        "first_token_ms": lambda request: request.first_token_s,
        "inter_token_ms": lambda request: request.inter_token_s,
        "request_ms": lambda request: request.total_s,
    }
    for axes, (name, measure) in zip(figure.subplots(1, 3), times.items(), strict=True):
        values = sorted(1e3 * value for each in result.load.requests if (value := measure(each)) is not None)
        axes.step(values, [100 * (i + 1) / report["trace_requests"] for i in range(len(values))], where="post")
        if (limit := getattr(limits, name)) is not None:
            axes.axvline(limit, color="tab:red", linestyle=":")
        axes.set_xscale("log")
        axes.set_xlabel(name.replace("_", " "))
        axes.set_ylim(0, 100)
    figure.axes[0].set_ylabel("% of the trace's requests within")
    figure.suptitle(f"acceptance {report['acceptance']}, {report['rate_scale']:g} times the trace's rate")
    figure.savefig(path, dpi=120)
