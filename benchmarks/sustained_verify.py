"""Time a verify while the device never rests, beside the card's clock and power: a card that reaches its power
limit slows down.

    PYTHONPATH=kernels:backend python benchmarks/sustained_verify.py --out results

The graphs of one captured verify of a 5-layer slice are replayed for some seconds with a pause of the device between
any two, timed by events without the pause. `nvidia-smi` says meanwhile what the clocks are and what holds them down.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kimi_backend.checkpoint.presets import Preset
from kimi_backend.config.settings import ServingSettings
from kimi_backend.runners.graphs.buckets import Bucket
from kimi_backend.runners.load.loading import load_pair
from slice_suite.card_watch import CardWatch
from slice_suite.configs import write_slice
from slice_suite.in_process import run_batch

PROMPT, NUM_OUTPUT_TOKENS = 1024, 96
"""Prompts of 64 sequences take ten steps; the first to decode must not end before the last begins."""
QUEUED = 4
"""Replays that wait on the device, so that it never waits for the host."""


def replay(run: Callable[[], object], seconds: float, pause_ms: float) -> list[float]:
    """Milliseconds of each replay, pauses left out."""
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        events.append((start, stop))
        if pause_ms:
            stop.synchronize()
            time.sleep(pause_ms / 1e3)
        elif len(events) > QUEUED:
            events[-QUEUED][1].synchronize()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in events]


def loaded(folder: Path, sizes: list[int], k: int) -> tuple[Any, Any, ServingSettings]:
    """Both runners of a slice of 5 layers, and their settings."""
    target, draft = write_slice(folder, 5, Preset.KIMI_K25)
    values = {
        "checkpoint": str(target),
        "draft": str(draft),
        "load_format": "dummy",
        "routing": "uniform",
        "synthetic_acceptance": str(float(k + 1)),
        "speculation_policy": "fixed",
        "max_model_len": str(PROMPT + NUM_OUTPUT_TOKENS),
        "kv_tokens": str(max(sizes) * (PROMPT + NUM_OUTPUT_TOKENS + 64)),
        "max_num_seqs": str(max(sizes)),
        "capture_batch_sizes": ",".join(map(str, sizes)),
        "max_num_batched_tokens": "8192",
        "max_speculative_tokens": str(k),
        "draft_quantization": "int4",
        "draft_vocab": "32768",
    }
    settings = ServingSettings.from_parameters(values, {})
    return *load_pair(settings), settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--batches", type=numbers, default=[4, 16, 64])
    parser.add_argument("--k", type=int, default=3, help="draft tokens under verification")
    parser.add_argument("--pauses", type=numbers, default=[0, 1, 3], help="milliseconds")
    parser.add_argument("--seconds", type=float, default=3.0, help="of replays of one case")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        target, draft, settings = loaded(Path(folder), options.batches, options.k)
    watch = CardWatch()
    for batch_size in options.batches:
        rounds = run_batch(
            target, draft, settings, batch_size=batch_size, prompt_len=PROMPT, num_output_tokens=NUM_OUTPUT_TOKENS,
            num_speculative_tokens=options.k, keeps_plans=True,
        )  # fmt: skip
        full = next(item for item in rounds if item.is_decode and item.num_rows == batch_size * (options.k + 1))
        target.launch(full.target_plan).wait()  # leaves a real step's inputs where the graphs read them
        step = target._graphs._steps[Bucket.of(batch_size, options.k + 1)]
        for pause_ms in options.pauses:
            time.sleep(1.0)  # the card cools and may use its full clock again
            start_s = time.perf_counter()
            times = replay(lambda step=step: (step.forward(), step.sample()), options.seconds, pause_ms)
            half = len(times) // 2
            row = {
                "batch_size": batch_size,
                "rows": batch_size * (options.k + 1),
                "pause_ms": pause_ms,
                "first_ms": round(statistics.median(times[:10]), 3),
                "second_half_ms": round(statistics.median(times[half:]), 3),
                **watch.between(start_s + options.seconds / 2, start_s + options.seconds),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    watch.close()
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        about = {"command": " ".join(sys.argv), "device": torch.cuda.get_device_name(), "torch": torch.__version__}
        (options.out / "sustained_verify.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
