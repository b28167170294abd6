"""The same cases through the real Triton Server: rounds as a client sees them, and what the server's parts say."""

import asyncio
import itertools
import re
import statistics
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kimi_backend.cli.serve import make_server
from kimi_backend.config.settings import ServingSettings
from kimi_backend.serving.embedded_server import EmbeddedServer
from kimi_client.load import LoadResult, run_load
from slice_suite.in_process import FIRST_PROMPT_TOKEN

_SAMPLE = re.compile(r"^(kimi_step_seconds_total|kimi_runner_seconds_total|kimi_steps_total)(\{.*\})? (\S+)$")
_LABEL = re.compile(r'(phase|runner)="(\w+)"')
WARM_UP_TOKENS = 12
NUM_WARM_GAPS = 3


@contextmanager
def running_server(settings: ServingSettings, log_file: Path) -> Iterator[EmbeddedServer]:
    """A server over these settings that answers."""
    server = make_server(settings, log_file=log_file)
    server.start()
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def measure_served(
    server: EmbeddedServer,
    vocab_size: int,
    *,
    batch_size: int,
    prompt_len: int,
    num_output_tokens: int,
    num_speculative_tokens: int,
) -> dict[str, Any]:
    """Everything measured of one case, as JSON values.

    Raises:
        RuntimeError: a request ended by an error.
    """
    shape = {
        "batch_size": batch_size,
        "prompt_len": prompt_len,
        "num_speculative_tokens": num_speculative_tokens,
    }
    _run(server, vocab_size, num_output_tokens=WARM_UP_TOKENS, seed=1, **shape)
    before = _read_metrics(server)
    result = _run(server, vocab_size, num_output_tokens=num_output_tokens, seed=2, **shape)
    after = _read_metrics(server)
    # Every step sends each request one response, so the time between two of them is a round.
    gaps = [
        1e3 * gap
        for request in result.requests
        for gap in itertools.starmap(lambda a, b: b - a, itertools.pairwise(request.chunk_times_s[NUM_WARM_GAPS:]))
    ]
    spent = {name: after[name] - before.get(name, 0.0) for name in after}
    num_steps = max(1.0, spent.pop("kimi_steps_total", 1.0))
    a_step = {name: round(1e3 * seconds / num_steps, 4) for name, seconds in spent.items()}
    speculation = result.summary()["speculation"]
    return shape | {
        "served_round_ms": round(statistics.median(gaps), 4),
        "served_round_p90_ms": round(statistics.quantiles(gaps, n=10)[-1], 4) if len(gaps) > 10 else None,
        "tokens_per_s": round(result.output_tokens_per_second, 1),
        "num_steps": num_steps,
        "mean_step_ms": a_step,
        "pretences": result.summary().get("pretences", []),
        "acceptance_length": speculation["acceptance_length"] if speculation else None,
    }


def _run(
    server: EmbeddedServer,
    vocab_size: int,
    *,
    batch_size: int,
    prompt_len: int,
    num_output_tokens: int,
    num_speculative_tokens: int,
    seed: int,
) -> LoadResult:
    rng = np.random.default_rng(seed)
    requests = [
        {
            "input_ids": rng.integers(min(FIRST_PROMPT_TOKEN, vocab_size // 2), vocab_size, prompt_len).tolist(),
            "max_tokens": num_output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "seed": 1000 * seed + index,
            "num_speculative_tokens": num_speculative_tokens,
        }
        for index in range(batch_size)
    ]
    result = asyncio.run(run_load(f"localhost:{server.ports.grpc}", requests, batch_size))
    if result.errors:
        raise RuntimeError(f"{len(result.errors)} of {batch_size} requests failed: {result.errors[0]}")
    return result


def _read_metrics(server: EmbeddedServer) -> dict[str, float]:
    """Seconds by phase and by runner since the server's start, and the steps, once the metrics have caught up."""
    time.sleep(0.6)
    with urllib.request.urlopen(f"http://localhost:{server.ports.metrics}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    found: dict[str, float] = {}
    for match in filter(None, map(_SAMPLE.match, lines)):
        label = _LABEL.search(match[2] or "")
        name = match[1] if label is None else f"{label[1]} {label[2]}"
        found[name] = found.get(name, 0.0) + float(match[3])
    return found
