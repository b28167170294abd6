"""Triton's own load generator as the one of `kimi bench`: the same requests in, the same measures out."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kimi_backend.errors import KimiError
from kimi_client import Chunk
from kimi_client._types import join_chunks
from kimi_client.load import LoadResult, RequestTimes

_NANOSECONDS = 1e-9


def find_perf_analyzer() -> str | None:
    """The program on the PATH or beside this interpreter; None where it is not installed."""
    return shutil.which("perf_analyzer") or shutil.which("perf_analyzer", path=str(Path(sys.executable).parent))


def input_data(requests: list[dict[str, Any]]) -> dict[str, Any]:
    """perf_analyzer's input JSON: one step a request, each field a list of elements."""
    return {"data": [{name: _elements(value) for name, value in {**r, "stream": True}.items()} for r in requests]}


def _elements(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], dict):  # chat messages travel as one JSON string
            return [json.dumps(value)]
        return {"content": list(value), "shape": [len(value)]}
    return [json.dumps(value) if isinstance(value, dict) else value]


def run_perf_analyzer(program: str, url: str, requests: list[dict[str, Any]], concurrency: int) -> LoadResult:
    """Send every request once, `concurrency` at a time.

    Raises:
        KimiError: perf_analyzer failed; carries the end of what it said.
    """
    with tempfile.TemporaryDirectory(prefix="kimi_bench_") as folder:
        data, export = Path(folder, "input.json"), Path(folder, "export.json")
        data.write_text(json.dumps(input_data(requests)))
        # Without a version it looks for one that got requests between two looks at the statistics, and fails where a
        # few requests have all arrived before the first.
        command = [program, "-m", "spec_ensemble", "-x", "1", "-u", url, "-i", "grpc", "--async", "--streaming"]
        command += [f"--input-data={data}", f"--concurrency-range={concurrency}", f"--request-count={len(requests)}"]
        command += [f"--profile-export-file={export}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0 or not export.exists():
            raise KimiError(f"perf_analyzer failed with code {done.returncode}: {(done.stdout + done.stderr)[-600:]}")
        return load_result(json.loads(export.read_text()), concurrency)


def load_result(export: dict[str, Any], concurrency: int) -> LoadResult:
    """Read what a profile export measured, in the form of our own load generator."""
    requests = export["experiments"][0]["requests"]
    times = tuple(_request_times(request) for request in requests)
    start = min(request["timestamp"] for request in requests)
    end = max(request["response_timestamps"][-1] for request in requests)
    return LoadResult(concurrency, (end - start) * _NANOSECONDS, times)


def _request_times(request: dict[str, Any]) -> RequestTimes:
    chunks = [_chunk(output) for output in request["response_outputs"]]
    start = request["timestamp"]
    return RequestTimes(tuple((t - start) * _NANOSECONDS for t in request["response_timestamps"]), join_chunks(chunks))


def _chunk(output: dict[str, Any]) -> Chunk:
    statistics = output.get("statistics")
    return Chunk(
        text=output.get("text_output", ""),
        num_tokens=int(output.get("num_output_tokens", 0)),
        finish_reason=output.get("finish_reason") or None,
        stop_reason=output.get("stop_reason") or None,
        statistics=json.loads(statistics) if statistics else {},
    )
