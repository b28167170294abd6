"""A load generator: keeps a number of streams running and measures what a user would feel.

A response may hold several tokens when speculation runs, so the time between responses (inter-chunk) and the time a
token (inter-token) are two measures; percentiles of one say nothing of the other.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kimi_client._errors import KimiClientError
from kimi_client._types import Completion, join_chunks
from kimi_client.aio import AsyncKimiClient

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """One finished request, in seconds from its start."""

    chunk_times_s: tuple[float, ...]
    completion: Completion

    @property
    def first_token_s(self) -> float:
        return self.chunk_times_s[0]

    @property
    def total_s(self) -> float:
        return self.chunk_times_s[-1]

    @property
    def inter_token_s(self) -> float | None:
        """Mean time a token after the first; None for a single token."""
        later = self.completion.num_output_tokens - 1
        return (self.total_s - self.first_token_s) / later if later > 0 else None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Everything one load measured."""

    concurrency: int
    wall_s: float
    requests: tuple[RequestTimes, ...]
    errors: tuple[str, ...] = field(default=())

    @property
    def output_tokens_per_second(self) -> float:
        return sum(r.completion.num_output_tokens for r in self.requests) / self.wall_s

    def summary(self) -> dict[str, Any]:
        """Plain numbers for JSON: percentiles in milliseconds, throughput, acceptance."""
        gaps = [b - a for r in self.requests for a, b in itertools.pairwise(r.chunk_times_s)]
        synthetic_parts = sorted({p for r in self.requests for p in r.completion.statistics.get("pretences", ())})
        per_token = [r.inter_token_s for r in self.requests if r.inter_token_s is not None]
        return {
            "concurrency": self.concurrency,
            "requests": len(self.requests),
            "errors": len(self.errors),
            "wall_s": round(self.wall_s, 3),
            "output_tokens_per_second": round(self.output_tokens_per_second, 2),
            "requests_per_second": round(len(self.requests) / self.wall_s, 3),
            "first_token_ms": percentiles([r.first_token_s for r in self.requests]),
            "inter_token_ms": percentiles(per_token),
            "inter_chunk_ms": percentiles(gaps),
            "request_ms": percentiles([r.total_s for r in self.requests]),
            "speculation": pooled_acceptance([r.completion.speculation for r in self.requests]),
            "speculation_by_proposer": acceptance_by_proposer([r.completion for r in self.requests]),
            "policy": pooled_policy([r.completion for r in self.requests]),
            **({"pretences": synthetic_parts} if synthetic_parts else {}),
        }


def join_results(results: Sequence[LoadResult]) -> LoadResult:
    """Loads that ran one after the other, as one."""
    return LoadResult(
        concurrency=results[0].concurrency,
        wall_s=sum(result.wall_s for result in results),
        requests=tuple(request for result in results for request in result.requests),
        errors=tuple(error for result in results for error in result.errors),
    )


def percentiles(values_s: Sequence[float]) -> dict[str, float] | None:
    """Seconds as milliseconds at each of PERCENTILES; None of nothing."""
    if not values_s:
        return None
    return {f"p{p}": round(float(np.percentile(values_s, p)) * 1e3, 3) for p in PERCENTILES}


def acceptance_by_proposer(completions: Sequence[Completion]) -> dict[str, dict[str, Any]]:
    """`pooled_acceptance` of the rounds of each proposer that had any."""
    by_request = [c.statistics.get("speculation_by_proposer") or {} for c in completions]
    names = sorted({name for rounds in by_request for name in rounds})
    pooled = {name: pooled_acceptance([rounds.get(name) for rounds in by_request]) for name in names}
    return {name: acceptance for name, acceptance in pooled.items() if acceptance is not None}


def pooled_acceptance(speculation: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Acceptance over all requests together: length, rate and per position; None where speculation never ran.

    Each position is divided by the rounds that proposed it.
    """
    stats = [s for s in speculation if s]
    rounds = sum(s["num_spec_steps"] for s in stats)
    if not rounds:
        return None
    drafted = sum(s["num_draft_tokens"] for s in stats)
    accepted = sum(s["num_accepted_draft_tokens"] for s in stats)
    depth = max(len(s["drafted_per_position"]) for s in stats)
    proposed_at = [_sum_at(stats, "drafted_per_position", i) for i in range(depth)]
    accepted_at = [_sum_at(stats, "accepted_per_position", i) for i in range(depth)]
    return {
        "rounds": rounds,
        "acceptance_length": round(1 + accepted / rounds, 4),
        "acceptance_rate": round(accepted / drafted, 4),
        "acceptance_per_position": [
            round(a / p, 4) if p else None for a, p in zip(accepted_at, proposed_at, strict=True)
        ],
    }


def pooled_policy(completions: Sequence[Completion]) -> dict[str, Any] | None:
    """The server's speculation policy and the share of verifies that carried 0, 1, … draft tokens; None where no
    response says."""
    stats = [c.statistics for c in completions if c.statistics.get("num_draft_tokens_histogram")]
    depth = max((len(s["num_draft_tokens_histogram"]) for s in stats), default=0)
    counts = [_sum_at(stats, "num_draft_tokens_histogram", i) for i in range(depth)]
    if not any(counts):
        return None
    names = sorted({s["speculation_policy"] for s in stats})
    return {"name": ", ".join(names), "shares": [round(count / sum(counts), 4) for count in counts]}


def _sum_at(stats: Sequence[dict[str, Any]], name: str, position: int) -> int:
    return sum(s[name][position] for s in stats if position < len(s[name]))


async def run_one(client: AsyncKimiClient, fields: dict[str, Any]) -> RequestTimes:
    """Send a request and note when each of its chunks came.

    Raises:
        KimiClientError: it failed.
    """
    start = time.perf_counter()
    times = []
    stream = client.stream(**fields)
    async for _ in stream:
        times.append(time.perf_counter() - start)
    return RequestTimes(tuple(times), join_chunks(stream.chunks))


async def run_load(
    url: str,
    requests: Sequence[dict[str, Any]],
    concurrency: int,
    on_done: Callable[[], None] = lambda: None,
) -> LoadResult:
    """Send every request, `concurrency` of them at a time.

    Args:
        requests: fields of each (see `KimiClient.stream`).
        on_done: called after each request, for a progress bar.
    """
    waiting = iter(requests)
    done: list[RequestTimes] = []
    errors: list[str] = []

    async with AsyncKimiClient(url) as client:

        async def worker() -> None:
            for fields in waiting:
                try:
                    done.append(await run_one(client, fields))
                except KimiClientError as error:
                    errors.append(f"{type(error).__name__}: {error}")
                on_done()

        start = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        wall_s = time.perf_counter() - start
    return LoadResult(concurrency, wall_s, tuple(done), tuple(errors))
