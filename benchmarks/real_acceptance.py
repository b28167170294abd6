"""Measure what speculation gains through Triton Server with a draft that really guesses: tokens/s with it and without.

    python -m kimi_nano prompts DATA prompts.jsonl
    python benchmarks/real_acceptance.py --checkpoint demo/kimi-nano --prompts prompts.jsonl [--json OUT]

Unlike benchmarks/slice.py, weights, routing and acceptance are a trained model's and prompts are of its held-out data.
Every case sends the same prompts, so a temperature's cases differ in speculation only.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from kimi_backend.cli.prompt_file import read_prompt_token_ids
from kimi_backend.config.settings import ServingSettings
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_client.load import run_load
from slice import probe
from slice_suite.served import Served, rounds_ms, running_server

Row = dict[str, Any]


def settings_of(args: argparse.Namespace, longest: int) -> ServingSettings:
    """Room for the most streams; whatever --set says besides."""
    values = {
        "checkpoint": args.checkpoint.resolve(),
        "draft": (args.draft or args.checkpoint / "draft").resolve(),
        "max_model_len": longest,
        "max_num_seqs": max(args.streams),
        "capture_batch_sizes": ",".join(map(str, args.streams)),
        "kv_tokens": 2 * longest * max(args.streams),
        "max_speculative_tokens": max(args.k),
        "speculation_policy": "fixed",
        **dict(pair.split("=", 1) for pair in args.set),
    }
    return ServingSettings.from_parameters({name: str(value) for name, value in values.items()}, {})


def measure(served: Served, args: argparse.Namespace, num_streams: int, temperature: float, k: int) -> Row:
    """One case, run twice; the second run counts."""
    count = max(num_streams, args.requests)
    prompts = itertools.islice(itertools.cycle(args.token_ids), count)
    requests = [
        {
            "input_ids": list(prompt),
            "max_tokens": args.num_tokens,
            "temperature": temperature,
            "ignore_eos": True,
            "seed": index,
            "num_speculative_tokens": k,
            "cache_salt": f"{index}",
        }
        for index, prompt in enumerate(prompts)
    ]
    url = f"localhost:{served.server.ports.grpc}"
    asyncio.run(run_load(url, requests[:num_streams], num_streams))
    result = asyncio.run(run_load(url, requests, num_streams))
    if result.errors:
        raise RuntimeError(f"{len(result.errors)} of {count} requests failed: {result.errors[0]}")
    gaps = [gap for request in result.requests for gap in rounds_ms(request)]
    summary = result.summary()
    return {
        "streams": num_streams,
        "temperature": temperature,
        "k": k,
        "requests": count,
        "round_ms": round(statistics.median(gaps), 3) if gaps else None,
        "tokens_per_s": round(result.output_tokens_per_second, 1),
        "tokens_per_s_of_a_stream": round(result.output_tokens_per_second / num_streams, 1),
        "speculation": summary["speculation"],
    }


def main() -> None:
    args = parse_arguments()
    prompts = read_prompt_token_ids(args.prompts, load_tokenizer(args.checkpoint))
    args.token_ids = [prompt[-args.prompt_tokens :] for prompt in prompts]
    rates = probe()
    report: Row = {
        "command": sys.argv,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "device": torch.cuda.get_device_name() if rates else "cpu",
        "read_gb_s": rates and round(rates.read_bytes_per_us / 1e3),
        "bf16_tflop_s": rates and round(rates.matmul_flops_per_us / 1e6),
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(args, max(map(len, args.token_ids)) + args.num_tokens + max(args.k) + 1)
        started = time.perf_counter()
        with running_server(settings, Path(folder) / "log") as served:
            report["seconds_to_ready"] = round(time.perf_counter() - started, 1)
            report |= {"aux": "buffer" if served.shares_aux else "tensor"}
            print(f"ready after {report['seconds_to_ready']} s", flush=True)
            for num_streams, temperature in itertools.product(args.streams, args.temperature):
                plain = None
                for k in args.k:
                    row = measure(served, args, num_streams, temperature, k)
                    plain = plain or row["tokens_per_s"]
                    row["speedup"] = round(row["tokens_per_s"] / plain, 3)
                    report["rows"].append(row)
                    length = row["speculation"] and row["speculation"]["acceptance_length"]
                    print(
                        f"{num_streams:3d} streams T={temperature:g} k={k}: round {row['round_ms'] or 'too few'} ms,"
                        f" {row['tokens_per_s']:.0f} tok/s, {row['speedup']:.2f}x, acceptance length {length}",
                        flush=True,
                    )
                    if args.json:
                        args.json.write_text(json.dumps(report, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--draft", type=Path, help="default: the checkpoint's folder draft")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines, as `kimi bench` takes them")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--k", type=int, nargs="+", default=[0, 3], help="0 first: the others are compared with it")
    parser.add_argument("--requests", type=int, default=32, help="of a case, at least; as many as streams if more")
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=256, help="what is kept of a prompt, from its end")
    parser.add_argument("--set", nargs="+", default=[], metavar="SETTING=VALUE", help="any other setting")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.k[0] != 0:
        parser.error(f"--k {args.k}: 0 first, the others are compared with it")
    return args


if __name__ == "__main__":
    main()
