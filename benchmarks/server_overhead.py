"""Split a round's cost through Triton Server by cause, against bare calls in the same run.

    python benchmarks/server_overhead.py --checkpoint PATH [--aux-transfer ipc tensor] [--json OUT]

Three loops over one server, for each way of handing aux hidden states over:

call     one call of a model that only answers, with a plan of the same size: the price of a call
bare     both runners, called with the same recorded plans again and again (benchmarks/steady_plans.py), by a model that
         does nothing else (benchmarks/models/bare_loop)
served   B streams with a reader each; the server's own metrics split a round into the runners' time, the way to them
         and back, and the engine's phases

What a served round takes beyond its runners is the cost of the server: calls, scheduling, packing, committing, and
waiting for the threads that send to B readers. Where the draft's call runs beside the target's, the round is the
target's call and what surrounds it; while the engine reads, plans and calls, the GPU runs the draft, so not all of that
cost is waited for. `--in-process` runs the same requests with both runners in this process, afterwards: what a served
round is longer than such a one is what the server costs in the end (`beyond`).
"""

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from rich.console import Console

from in_process_rounds import rounds_in_process
from kimi_backend.config.settings import ServingSettings
from kimi_backend.hosting.embedded_server import MODELS, EmbeddedServer
from kimi_backend.hosting.settings_to_server import find_model_repository, make_server
from kimi_backend.types import codec
from kimi_client import Completion
from kimi_client.load import run_load
from paced_runners import write_model
from steady_plans import steady_plans

OWN_MODELS = ("bare_callee", "bare_loop")
RUNNERS = {"kimi_target": "target", "eagle3_draft": "draft"}
PROMPT = "x" * 64
MAX_MODEL_LEN = 512
METRICS_SETTLE_S = 0.8
LOG_END = 4000
"""Characters of a failed server's log that are shown."""
SHARED = "aux hidden states stay on the GPU"
"""The line of a server that hands them over in a buffer."""
NOTHING_RUNS_IN = ("schedule", "commit", "publish")

Row = dict[str, Any]


def median_ms(
    client: grpcclient.InferenceServerClient, arrays: dict[str, Any], rounds: int, takes_tensor: bool
) -> tuple[float, float]:
    """Median of the bare loop's rounds, and of what they were longer than their runners."""
    datatypes = {"ROUNDS": "INT32", "TAKES_TENSOR": "BOOL"}
    arrays = {**arrays, "ROUNDS": np.array([rounds], np.int32), "TAKES_TENSOR": np.array([takes_tensor])}
    inputs = []
    for name, array in arrays.items():
        tensor = grpcclient.InferInput(name, list(array.shape), datatypes.get(name, "UINT8"))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    result = client.infer("bare_loop", inputs)
    seconds, in_runners = result.as_numpy("SECONDS"), result.as_numpy("RUNNER_SECONDS")
    return float(np.median(seconds)) * 1e3, float(np.median(seconds - in_runners)) * 1e3


def scrape(port: int) -> dict[str, float]:
    """This server's own counters: `name`, or `name value-of-its-label` -> value."""
    text = urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=10).read().decode()
    samples = {}
    for name, labels, value in re.findall(r"^(kimi_\w+_total)\{(.*)\} (\S+)$", text, re.MULTILINE):
        own = re.search(r'(?:phase|runner)="(\w+)"', labels)
        samples[f"{name} {own[1]}" if own else name] = float(value)
    return samples


def split_by(since: dict[str, float], name: str) -> dict[str, float]:
    """Milliseconds a round of one counter of seconds, by its label."""
    found = {key.split()[1]: value for key, value in since.items() if key.startswith(f"{name} ")}
    return {label: 1e3 * value / since["kimi_steps_total"] for label, value in found.items()}


def served(server: EmbeddedServer, count: int, k: int, output_tokens: int, stream: bool) -> Row:
    """Milliseconds a round, by cause, while `count` streams run."""
    fields = {"stream": stream, "max_tokens": output_tokens, "ignore_eos": True, "num_speculative_tokens": k}
    requests = [{"text_input": PROMPT, "seed": i, **fields} for i in range(count)]
    asyncio.run(run_load(f"localhost:{server.ports.grpc}", requests, count))  # compiles, fills caches
    time.sleep(METRICS_SETTLE_S)
    before = scrape(server.ports.metrics)
    result = asyncio.run(run_load(f"localhost:{server.ports.grpc}", requests, count))
    if result.errors:
        raise RuntimeError(result.errors[0])
    time.sleep(METRICS_SETTLE_S)
    after = scrape(server.ports.metrics)
    since = {name: after[name] - before.get(name, 0.0) for name in after}
    phase, runner = split_by(since, "kimi_step_seconds_total"), split_by(since, "kimi_runner_seconds_total")
    longest = max(result.requests, key=lambda r: num_rounds(r.completion))
    steps, speculation = num_rounds(longest.completion), longest.completion.speculation
    return {
        "rounds": since["kimi_steps_total"],
        "round_ms": sum(phase.values()),
        "target_runner_ms": runner["target"],
        "draft_runner_ms": runner["draft"],
        "target_way_ms": phase["target"] - runner["target"],
        "draft_way_ms": phase["draft"] - runner["draft"],
        **{f"{name}_ms": phase[name] for name in NOTHING_RUNS_IN},
        "server_ms": sum(phase.values()) - sum(runner.values()),
        # The request with the most rounds ran from the first to the last.
        "round_at_client_ms": (longest.total_s - longest.first_token_s) / steps * 1e3,
        "responses_per_step": len(longest.chunk_times_s) / (steps + 1),
        "acceptance_length": speculation["mean_acceptance_length"] if speculation else 1.0,
        "output_tokens_per_second": result.output_tokens_per_second,
    }


def num_rounds(completion: Completion) -> int:
    """Rounds behind the first token."""
    if completion.speculation is None:
        return completion.num_output_tokens - 1
    steps: int = completion.speculation["num_spec_steps"]
    return steps


def settings_of(args: argparse.Namespace, aux_transfer: str) -> ServingSettings:
    """Few captured sizes, so that a server starts soon."""
    values = {
        "checkpoint": args.checkpoint.resolve(),
        "draft": (args.draft or args.checkpoint / "draft").resolve(),
        "device": args.device,
        "kernels": args.kernels,
        "aux_transfer": aux_transfer,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": max(args.streams),
        "max_num_batched_tokens": MAX_MODEL_LEN,
        "max_speculative_tokens": max(args.k, 1),
        "num_speculative_tokens": args.k,
        "speculation_policy": "fixed",
        "kv_tokens": MAX_MODEL_LEN * max(args.streams),
        **dict(pair.split("=", 1) for pair in args.set),
    }
    return ServingSettings.from_parameters({name: str(value) for name, value in values.items()}, {})


def measure(args: argparse.Namespace, aux_transfer: str, console: Console) -> list[Row]:
    """One server's rows, one for each number of streams."""
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "models"
        repository.mkdir()
        own = [Path(__file__).parent / "models" / name for name in OWN_MODELS]
        for model in [find_model_repository() / name for name in MODELS] + own:
            (repository / model.name).symlink_to(model.resolve())
        if args.paced is not None:
            put_paced_runners(repository, args)
        settings = settings_of(args, aux_transfer)
        server = make_server(settings, model_repository=repository, log_file=Path(folder) / "log")
        for name in OWN_MODELS:
            server.load_too(name)
        server.start()
        try:
            with console.status(f"aux_transfer={aux_transfer}"):
                server.wait_until_ready()
                is_shared = SHARED in (Path(folder) / "log").read_text(errors="replace")
                rows = [_row(args, server, count, is_shared) for count in args.streams]
        except Exception:
            sys.stderr.write((Path(folder) / "log").read_text(errors="replace")[-LOG_END:])
            raise
        finally:
            server.stop()
    if args.in_process:
        add_in_process(args, settings, rows)
    return [{"aux": "ipc" if is_shared else "tensor", **row} for row in rows]


def add_in_process(args: argparse.Namespace, settings: ServingSettings, rows: list[Row]) -> None:
    """Add to each row what its round takes with both runners in this process."""
    fields = {"max_tokens": args.output_tokens, "ignore_eos": True, "num_speculative_tokens": args.k}
    found = rounds_in_process(settings, args.streams, fields, PROMPT)
    for row in rows:
        row["in_process_round_ms"] = found[row["streams"]]
        row["beyond_ms"] = row["round_ms"] - found[row["streams"]]


def put_paced_runners(repository: Path, args: argparse.Namespace) -> None:
    """Put models that only wait in place of the runners."""
    config = json.loads((args.checkpoint / "config.json").read_text())
    vocab_size = config.get("text_config", config)["vocab_size"]
    for (model, role), milliseconds in zip(RUNNERS.items(), args.paced, strict=True):
        (repository / model).unlink()
        config_file = find_model_repository() / model / "config.pbtxt"
        write_model(repository / model, config_file, role, milliseconds / 1e3, vocab_size)


def _row(args: argparse.Namespace, server: EmbeddedServer, count: int, is_shared: bool) -> Row:
    row = served(server, count, args.k, args.output_tokens, not args.no_stream)
    client = grpcclient.InferenceServerClient(f"localhost:{server.ports.grpc}")
    target, draft = map(codec.encode, steady_plans(count, args.k, 0 if is_shared else None))
    call_ms, _ = median_ms(client, {"TARGET_PLAN": target}, args.rounds, False)
    bare_ms = bare_ways_ms = float("nan")
    if args.k:
        plans = {"TARGET_PLAN": target, "DRAFT_PLAN": draft}
        bare_ms, bare_ways_ms = median_ms(client, plans, args.rounds, not is_shared)
    client.close()
    allowed = (2 if args.k else 1) * call_ms + 0.4
    bare = {"call_ms": call_ms, "bare_round_ms": bare_ms, "bare_ways_ms": bare_ways_ms}
    return {"streams": count, **bare, "allowed_ms": allowed, **row}


def print_rows(rows: list[Row]) -> None:
    """The split, one line a row."""
    columns = (
        "aux",
        "streams",
        "call_ms",
        "bare_round_ms",
        "bare_ways_ms",
        "round_ms",
        "target_runner_ms",
        "draft_runner_ms",
    )
    columns += ("target_way_ms", "draft_way_ms", "schedule_ms", "commit_ms", "publish_ms", "server_ms", "allowed_ms")
    columns += ("round_at_client_ms", "output_tokens_per_second")
    columns += tuple(name for name in ("in_process_round_ms", "beyond_ms") if name in rows[0])
    print(" | ".join(column.removesuffix("_ms") for column in columns), flush=True)
    for row in rows:
        values = (row[column] for column in columns)
        print(" | ".join(f"{value:.3f}" if isinstance(value, float) else str(value) for value in values), flush=True)


def gpu_rates() -> Row:
    """Read bandwidth and rate of the matrix products of this run; empty without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    from kernel_cases.ceilings import measure_ceilings

    ceilings = measure_ceilings()
    torch.cuda.empty_cache()
    return {
        "gpu": torch.cuda.get_device_name(),
        "read_gb_s": round(ceilings.read_bytes_per_us / 1e3),
        "bf16_tflop_s": round(ceilings.matmul_flops_per_us / 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--draft", type=Path, help="default: the checkpoint's folder draft")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--aux-transfer", nargs="+", default=["auto"])
    parser.add_argument("--k", type=int, default=3, help="draft tokens; 0: the target alone, and no bare rounds")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--output-tokens", type=int, default=192)
    parser.add_argument("--in-process", action="store_true", help="afterwards, the same without a server between")
    parser.add_argument("--no-stream", action="store_true", help="one response a request: what sending each step costs")
    parser.add_argument(
        "--paced",
        type=float,
        nargs=2,
        metavar=("TARGET_MS", "DRAFT_MS"),
        help="in place of both runners, ones that only wait so long: the server alone, without a GPU",
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="SETTING=VALUE", help="any other setting")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console(stderr=True)
    rates = gpu_rates() if args.device != "cpu" else {}
    print(rates)
    rows: list[Row] = []
    for aux_transfer in args.aux_transfer:
        rows += measure(args, aux_transfer, console)
        print_rows(rows)
        if args.json:
            report = {"command": sys.argv, "k": args.k, **rates, "rows": rows}
            args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
