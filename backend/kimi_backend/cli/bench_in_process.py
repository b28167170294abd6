"""`kimi bench --in-process`: the engine and both models in this process, no server, no client."""

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kimi_backend.cli.acceptance import acceptance_kind
from kimi_backend.cli.cost_report import costs_report, print_costs
from kimi_backend.cli.local_engine import local_engine
from kimi_backend.cli.prompt_file import read_prompt_token_ids
from kimi_backend.config.settings import ServingSettings
from kimi_backend.engine.engine import Engine
from kimi_backend.engine.statistics import EngineStatistics
from kimi_backend.serving.responses import speculation_json, statistics_json
from kimi_backend.spec_decode.policy import policy_shares
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_backend.types.request import GenerateRequest, SamplingParams, TokenDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLoad:
    """The fields that every request of a run has in common."""

    sampling: SamplingParams
    num_speculative_tokens: int
    num_requests: int | None = None
    """None: one a prompt; else the prompts in turn."""


class _Client:
    """Keeps one request's deltas."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []
        self.done = threading.Event()

    def __call__(self, delta: TokenDelta) -> None:
        self.deltas.append(delta)
        if delta.finish_reason is not None:
            self.done.set()

    def as_json(self) -> dict[str, Any]:
        last = self.deltas[-1]
        assert last.stats is not None
        assert last.finish_reason is not None
        return {
            "text": "".join(delta.text for delta in self.deltas),
            "token_ids": [token_id for delta in self.deltas for token_id in delta.token_ids],
            "finish_reason": last.finish_reason.value,
            "error": last.error,
            "statistics": statistics_json(last.stats),
        }


def run_bench(settings: ServingSettings, prompts: Path | None, load: BenchLoad) -> dict[str, Any]:
    """Load the models, run every prompt to its end, all of them together, and return what was measured.

    Raises:
        ConfigError, CheckpointError: the settings or files cannot be served.
        InvalidRequestError: a prompt or parameter is wrong; names the line or the field.
    """
    tokenizer = load_tokenizer(settings.tokenizer or settings.checkpoint)
    prompt_token_ids = read_prompt_token_ids(prompts, tokenizer)
    with local_engine(settings, tokenizer) as engine:
        report = _measure(engine, prompt_token_ids, load)
        report["step_costs"] = costs_report(engine.step_costs, "this machine")
    return report


def _measure(engine: Engine, prompts: list[tuple[int, ...]], load: BenchLoad) -> dict[str, Any]:
    num_requests = len(prompts) if load.num_requests is None else load.num_requests
    clients = [_Client() for _ in range(num_requests)]
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    start_s = time.perf_counter()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("requests", total=num_requests)
        for index, client in enumerate(clients):
            engine.submit(_request(index, prompts[index % len(prompts)], load), client)
        for client in clients:
            client.done.wait()
            progress.advance(task)
    wall_s = time.perf_counter() - start_s
    return _report(engine.statistics(), [client.as_json() for client in clients], wall_s)


def _request(index: int, prompt: tuple[int, ...], load: BenchLoad) -> GenerateRequest:
    seed = load.sampling.seed
    return GenerateRequest(
        request_id=f"bench-{index}",
        prompt_token_ids=prompt,
        sampling=load.sampling if seed is None else replace(load.sampling, seed=(seed + index) % 2**64),
        num_speculative_tokens=load.num_speculative_tokens,
    )


def _report(statistics: EngineStatistics, requests: list[dict[str, Any]], wall_s: float) -> dict[str, Any]:
    speculation = speculation_json(statistics.totals.speculation)
    num_tokens = sum(len(request["token_ids"]) for request in requests)
    steps = max(statistics.num_steps, 1)
    return {
        "acceptance_length": speculation["mean_acceptance_length"] if speculation else None,
        "acceptance_rate": speculation["draft_acceptance_rate"] if speculation else None,
        "acceptance_per_position": speculation["acceptance_per_position"] if speculation else [],
        "speculative_decoding": speculation,
        "speculation_by_proposer": {
            proposer: speculation_json(rounds) for proposer, rounds in statistics.totals.speculation_by_proposer.items()
        },
        "speculation_policy": statistics.speculation_policy,
        "num_draft_tokens_histogram": list(statistics.totals.num_draft_tokens_histogram),
        "num_output_tokens": num_tokens,
        "wall_s": round(wall_s, 4),
        "output_tokens_per_second": round(num_tokens / wall_s, 2),
        "num_steps": statistics.num_steps,
        "step_ms": {phase: round(1e3 * s / steps, 4) for phase, s in statistics.step_seconds.items()},
        "acceptance": acceptance_kind(statistics.synthetic_parts),
        "pretences": list(statistics.synthetic_parts),
        "errors": sum(request["error"] is not None for request in requests),
        "requests": requests,
    }


def print_report(report: dict[str, Any]) -> None:
    """The report as a table on standard output."""
    said = [f"acceptance {report['acceptance']}", *report["pretences"]]
    table = Table(title=", ".join(["kimi bench --in-process", *said]))
    table.add_column("")
    table.add_column("value", justify="right")
    for key in ("output_tokens_per_second", "num_output_tokens", "num_steps", "wall_s", "errors"):
        table.add_row(key, str(report[key]))
    if report["acceptance_length"] is not None:
        table.add_row("acceptance length (1 + accepted a round)", f"{report['acceptance_length']:.3f}")
        table.add_row("acceptance rate (accepted / drafted)", f"{report['acceptance_rate']:.3f}")
    for position, rate in enumerate(report["acceptance_per_position"], 1):
        if rate is not None:
            table.add_row(f"accepted at position {position}", f"{rate:.3f}")
    table.add_row("speculation policy", report["speculation_policy"])
    table.add_row("verifies with k = 0, 1, …", policy_shares(report["num_draft_tokens_histogram"]))
    for phase, milliseconds in report["step_ms"].items():
        table.add_row(f"mean step, {phase} (ms)", f"{milliseconds:.3f}")
    Console().print(table)
    if report["step_costs"] is not None:
        print_costs(Console(), report["step_costs"])
