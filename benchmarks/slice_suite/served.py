"""The same cases through the real Triton Server: rounds as a client sees them, and what the server's parts say."""

import asyncio
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from kimi_backend.config.settings import ServingSettings
from kimi_backend.hosting.embedded_server import MODELS, EmbeddedServer
from kimi_backend.hosting.settings_to_server import find_model_repository, make_server
from kimi_backend.types import codec
from kimi_client.load import LoadResult, RequestTimes, run_load
from slice_suite.in_process import FIRST_PROMPT_TOKEN
from steady_plans import steady_plans

_SAMPLE = re.compile(r"^(kimi_step_seconds_total|kimi_runner_seconds_total|kimi_steps_total)(\{.*\})? (\S+)$")
_LABEL = re.compile(r'(phase|runner)="(\w+)"')
WARM_UP_TOKENS = 12
NUM_WARM_GAPS = 3
GAPS_AT_ONCE = 4
"""A client that is late reads several responses together, so rounds are timed over a few of them."""
NUM_CALLS = 200
CALL_MODELS = ("bare_callee", "bare_loop")
"""Measure what a call costs that does nothing (benchmarks/models)."""
ALLOWED_BEYOND_CALLS_MS = 0.4
SHARED = "aux hidden states stay on the GPU"
"""The line of a server that hands them over in a buffer."""
LOG_END = 4000
"""Characters of a failed server's log that are shown."""


@dataclass(frozen=True, slots=True)
class Served:
    """A server that answers, and how its runners share the GPU."""

    server: EmbeddedServer
    shares_aux: bool


@contextmanager
def running_server(settings: ServingSettings, log_file: Path) -> Iterator[Served]:
    """A server over these settings that answers."""
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        own = [Path(__file__).parents[1] / "models" / name for name in CALL_MODELS]
        for model in [find_model_repository() / name for name in MODELS] + own:
            (repository / model.name).symlink_to(model.resolve())
        server = make_server(settings, model_repository=repository, log_file=log_file)
        for name in CALL_MODELS:
            server.load_too(name)
        server.start()
        try:
            server.wait_until_ready()
            yield Served(server, SHARED in log_file.read_text(errors="replace"))
        except Exception:
            sys.stderr.write(log_file.read_text(errors="replace")[-LOG_END:])
            raise
        finally:
            server.stop()


def measure_served(
    served: Served,
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
    server = served.server
    shape = {
        "batch_size": batch_size,
        "prompt_len": prompt_len,
        "num_speculative_tokens": num_speculative_tokens,
    }
    _run(server, vocab_size, num_output_tokens=WARM_UP_TOKENS, seed=1, **shape)
    before = _read_metrics(server)
    result = _run(server, vocab_size, num_output_tokens=num_output_tokens, seed=2, **shape)
    after = _read_metrics(server)
    gaps = [gap for request in result.requests for gap in rounds_ms(request)]
    spent = {name: after[name] - before.get(name, 0.0) for name in after}
    num_steps = max(1.0, spent.pop("kimi_steps_total", 1.0))
    a_step = {name: round(1e3 * seconds / num_steps, 4) for name, seconds in spent.items()}
    call_ms = call_round_trip_ms(server, batch_size, num_speculative_tokens)
    speculation = result.summary()["speculation"]
    return shape | {
        "aux": "buffer" if served.shares_aux else "tensor",
        "served_round_ms": round(statistics.median(gaps), 4) if gaps else None,
        "served_round_p90_ms": round(statistics.quantiles(gaps, n=10)[-1], 4) if len(gaps) > 10 else None,
        "tokens_per_s": round(result.output_tokens_per_second, 1),
        "num_steps": num_steps,
        "mean_step_ms": a_step,
        "call_ms": round(call_ms, 4),
        **server_share(a_step, call_ms, num_calls=2 if num_speculative_tokens else 1),
        "pretences": result.summary().get("pretences", []),
        "acceptance_length": speculation["acceptance_length"] if speculation else None,
    }


def rounds_ms(request: RequestTimes) -> list[float]:
    """A step sends each request a response, but responses that wait are merged: so the time between two of them is as
    many rounds as the request's steps are more than its responses."""
    times = request.chunk_times_s
    speculation = request.completion.statistics.get("speculative_decoding")
    num_rounds = 1 + speculation["num_spec_steps"] if speculation else request.completion.num_output_tokens
    steps_a_response = max(1.0, num_rounds / len(times))
    kept = times[NUM_WARM_GAPS:]
    return [
        1e3 * (end - start) / GAPS_AT_ONCE / steps_a_response
        for start, end in zip(kept, kept[GAPS_AT_ONCE:], strict=False)
    ]


def server_share(step_ms: dict[str, float], call_ms: float, num_calls: int) -> dict[str, Any]:
    """Split what a step takes beside its runners by cause, with what is allowed: bare calls and 0.4 ms.

    Args:
        step_ms: mean of a step, `phase NAME` and `runner NAME`. Steps over prompts are among them, whose runners take
            longer; what is beside the runners hardly differs.
    """
    phases = {name.split()[1]: ms for name, ms in step_ms.items() if name.startswith("phase ")}
    runners = {name.split()[1]: ms for name, ms in step_ms.items() if name.startswith("runner ")}
    by_cause = {
        (f"way to the {name}" if name in runners else name): round(ms - runners.get(name, 0.0), 4)
        for name, ms in phases.items()
    }
    return {
        "server_ms": round(sum(by_cause.values()), 4),
        "server_ms_by_cause": by_cause,
        "allowed_server_ms": round(num_calls * call_ms + ALLOWED_BEYOND_CALLS_MS, 4),
    }


def call_round_trip_ms(server: EmbeddedServer, batch_size: int, num_speculative_tokens: int) -> float:
    """Median of calls to a model that only answers, with a plan of the batch's size."""
    values: dict[str, tuple[str, Any]] = {
        "TARGET_PLAN": ("UINT8", codec.encode(steady_plans(batch_size, num_speculative_tokens)[0])),
        "ROUNDS": ("INT32", np.array([NUM_CALLS], np.int32)),
        "TAKES_TENSOR": ("BOOL", np.array([False])),
    }
    inputs = []
    for name, (datatype, array) in values.items():
        tensor = grpcclient.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    client = grpcclient.InferenceServerClient(f"localhost:{server.ports.grpc}")
    try:
        return float(np.median(client.infer("bare_loop", inputs).as_numpy("SECONDS"))) * 1e3
    finally:
        client.close()


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
