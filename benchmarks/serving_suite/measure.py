"""Runs perf_analyzer over a case and keeps what it measured as plain numbers."""

import json
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from kimi_backend.cli.perf_analyzer import input_data, load_result
from kimi_backend.errors import KimiError
from kimi_client.load import LoadResult
from serving_suite.loads import Case

LONGEST_CASE_S = 900


def command_of(program: str, url: str, case: Case, data: Path, export: Path) -> list[str]:
    """perf_analyzer's command line; everything in it but the two files is kept in the report."""
    return [
        program,
        *("-m", "spec_ensemble", "-x", "1", "-u", url, "-i", "grpc", "--async", "--streaming"),
        *case.arguments,
        f"--request-count={len(case.requests)}",
        f"--input-data={data}",
        f"--profile-export-file={export}",
    ]


def run_case(program: str, url: str, case: Case) -> dict[str, Any]:
    """Measure one case.

    Raises:
        KimiError: perf_analyzer failed; carries the end of what it said.
    """
    with tempfile.TemporaryDirectory(prefix="kimi_serving_") as folder:
        data, export = Path(folder, "input.json"), Path(folder, "export.json")
        data.write_text(json.dumps(input_data(case.requests)))
        command = command_of(program, url, case, data, export)
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_CASE_S)
        if done.returncode != 0 or not export.exists():
            # Of a wrong option it prints its whole usage after the reason.
            said = (done.stdout + done.stderr).split("Usage:")[0]
            raise KimiError(f"perf_analyzer failed with code {done.returncode}: {said[-800:]}")
        result = load_result(json.loads(export.read_text()), 0)
    return {
        "label": case.label,
        "x": case.x,
        "perf_analyzer": [*case.arguments, f"--request-count={len(case.requests)}"],
        **report(result),
    }


def report(result: LoadResult) -> dict[str, Any]:
    """The load's summary and what the server said of prompts and cache."""
    summary = result.summary()
    del summary["concurrency"]
    stats = [request.completion.statistics for request in result.requests]
    prompt = sum(s["num_prompt_tokens"] for s in stats)
    cached = sum(s["num_cached_tokens"] for s in stats)
    return {
        **summary,
        "mean_prompt_tokens": round(statistics.fmean(s["num_prompt_tokens"] for s in stats), 1),
        "cached_share": round(cached / prompt, 4),
        "queue_ms_p50": round(statistics.median(s["queue_time_s"] for s in stats) * 1e3, 3),
    }
