"""Output tokens a second of tritonclient's `infer()` beside streams, in turns on one server.

    python benchmarks/unary_throughput.py --checkpoint demo/kimi-nano [--concurrency 64] [--requests 256]
        [--max-tokens 32] [--rounds 3] [--json OUT]

Both clients run on asyncio in this process, with as many requests under way, on the same prompts and seeds: streams of
`spec_ensemble` through kimi_client, and `tritonclient.grpc.aio`'s `infer` of `spec_ensemble_unary`. They must give the
same texts. The exit code is 1 where `infer()` reaches less than 0.9 of the streams' throughput.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc.aio as grpcclient
from rich.console import Console

from kimi_backend.config.settings import ServingSettings
from kimi_backend.hosting.settings_to_server import make_server
from kimi_client.load import run_load

MODEL = "spec_ensemble_unary"
LEAST_SHARE = 0.9
TYPES: dict[str, tuple[str, Any]] = {
    "text_input": ("BYTES", np.object_),
    "max_tokens": ("INT32", np.int32),
    "seed": ("UINT64", np.uint64),
    "ignore_eos": ("BOOL", np.bool_),
}
Texts = dict[int, str]


def make_requests(count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Short prompts, each with a seed of its own."""
    return [
        {"text_input": f"def function_{i}(a, b):", "max_tokens": max_tokens, "seed": i, "ignore_eos": True}
        for i in range(count)
    ]


async def run_streams(url: str, requests: list[dict[str, Any]], concurrency: int) -> tuple[float, Texts]:
    """(output tokens a second, texts by seed)."""
    result = await run_load(url, requests, concurrency)
    if result.errors:
        raise RuntimeError(result.errors[0])
    tokens = sum(request.completion.num_output_tokens for request in result.requests)
    texts = {request.completion.statistics["seed"]: request.completion.text for request in result.requests}
    return tokens / result.wall_s, texts


async def run_unary(url: str, requests: list[dict[str, Any]], concurrency: int) -> tuple[float, Texts]:
    """The same through `infer()`."""
    waiting, texts, num_tokens = iter(requests), dict[int, str](), 0

    async def worker(client: grpcclient.InferenceServerClient) -> None:
        nonlocal num_tokens
        for fields in waiting:
            result = await client.infer(MODEL, [_tensor(name, value) for name, value in fields.items()])
            texts[fields["seed"]] = result.as_numpy("text_output").reshape(-1)[0].decode()
            num_tokens += int(result.as_numpy("num_output_tokens").reshape(-1)[0])

    async with grpcclient.InferenceServerClient(url) as client:
        start = time.perf_counter()
        await asyncio.gather(*(worker(client) for _ in range(concurrency)))
        return num_tokens / (time.perf_counter() - start), texts


def _tensor(name: str, value: Any) -> grpcclient.InferInput:
    datatype, dtype = TYPES[name]
    tensor = grpcclient.InferInput(name, [1, 1], datatype)
    tensor.set_data_from_numpy(np.array([[value]], dtype=dtype))
    return tensor


def measure(url: str, arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run both in turns; the first turn of each does not count."""
    requests = make_requests(arguments.requests, arguments.max_tokens)
    rows = []
    for turn in range(arguments.rounds + 1):
        streams, expected = asyncio.run(run_streams(url, requests, arguments.concurrency))
        unary, texts = asyncio.run(run_unary(url, requests, arguments.concurrency))
        if texts != expected:
            raise RuntimeError("infer() gave other texts than the streams")
        console.print(f"turn {turn}: streams {streams:.0f} tokens/s, infer() {unary:.0f}, {unary / streams:.3f}")
        rows.append({"streams": streams, "infer": unary, "share": unary / streams})
    counted = rows[1:]
    return {"share": statistics.median(row["share"] for row in counted), "turns": counted}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console = Console()
    draft = arguments.checkpoint / "draft"
    settings = ServingSettings(
        checkpoint=str(arguments.checkpoint), draft=str(draft) if draft.is_dir() else "", unary="true"
    )
    with tempfile.TemporaryDirectory() as folder:
        server = make_server(settings, log_file=Path(folder, "server.log"))
        server.start()
        try:
            console.print("starting the server ...")
            server.wait_until_ready()
            report = measure(f"localhost:{server.ports.grpc}", arguments, console)
        finally:
            server.stop()
    console.print(f"infer() reaches {report['share']:.3f} of the streams' throughput (median)")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["share"] >= LEAST_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
