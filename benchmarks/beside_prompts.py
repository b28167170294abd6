"""The time between two responses of streams while long prompts come in, and alone.

    PYTHONPATH=kernels:backend python benchmarks/beside_prompts.py --rank-of 8 --layers 25 --prompt-tokens 65536
    python benchmarks/beside_prompts.py --checkpoint demo/kimi-nano --prompt-tokens 1800 --stream-prompt 64 --prompts 8

In one process, without a server. Streams decode alone for a while; then the prompts come, each as soon as the one
before has its first token. A response carries what a round accepted: with speculation several tokens.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from kimi_backend.checkpoint.presets import Preset
from kimi_backend.config.settings import ServingSettings
from kimi_backend.engine.engine import Engine
from kimi_backend.serving.spec_ensemble_server import scheduler_settings
from kimi_backend.types.request import GenerateRequest, SamplingParams, TokenDelta

READY_S = 120.0
FIRST_TOKEN_S = 120.0
MARGIN_TOKENS = 80


@dataclasses.dataclass(slots=True)
class Heard:
    """The times at which a request's responses came."""

    times: list[float] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    error: str = ""
    changed: threading.Condition = dataclasses.field(default_factory=threading.Condition)

    def __call__(self, delta: TokenDelta) -> None:
        with self.changed:
            if delta.token_ids:
                self.times.append(time.perf_counter())
                self.num_tokens += len(delta.token_ids)
            self.error = self.error or delta.error or ""
            self.changed.notify_all()

    def wait(self, count: int) -> float:
        """Wait for so many responses. Returns when the last of them came.

        Raises:
            RuntimeError: the request ended by an error, or nothing came.
        """
        with self.changed:
            if not self.changed.wait_for(lambda: len(self.times) >= count or self.error, FIRST_TOKEN_S) or self.error:
                raise RuntimeError(self.error or f"no response in {FIRST_TOKEN_S:.0f} s")
            return self.times[count - 1]

    def gaps(self, start: float, end: float) -> list[float]:
        """Milliseconds between responses, of those that came in this time."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [1e3 * (after - before) for before, after in pairs if start <= after <= end]


def main() -> None:
    options = parse_options()
    report: dict[str, Any] = {"options": {name: str(value) for name, value in vars(options).items()}, "cases": []}
    with tempfile.TemporaryDirectory() as folder:
        settings, num_ranks = make_settings(options, Path(folder))
        start = time.perf_counter()
        target, draft = load(settings, num_ranks)
        report["load_s"] = round(time.perf_counter() - start, 1)
        print(f"loaded in {report['load_s']} s")
        for _ in range(options.turns):
            for rows in options.rows:
                case = measure(options, settings, target, draft, rows, num_ranks)
                report["cases"].append(case)
                print(json.dumps(case), flush=True)
                if options.out:
                    options.out.parent.mkdir(parents=True, exist_ok=True)
                    options.out.write_text(json.dumps(report, indent=1))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checkpoint", type=Path, help="with a draft in its folder draft; else a slice with made weights"
    )
    parser.add_argument("--preset", type=Preset, default=Preset.KIMI_K25, help="of the slice")
    parser.add_argument("--layers", type=int, default=25)
    parser.add_argument("--rank-of", type=int, default=1, metavar="N", help="what one of N GPUs runs")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--stream-prompt", type=int, default=1024)
    parser.add_argument("--rounds-alone", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=65536)
    parser.add_argument("-k", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[512], help="max_prompt_tokens_beside_decode, in turns")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a JSON file")
    return parser.parse_args()


def make_settings(options: argparse.Namespace, folder: Path) -> tuple[ServingSettings, int]:
    """Settings with room for all of it, and of how many ranks one is loaded."""
    output = stream_tokens(options)
    longest = max(options.prompt_tokens, options.stream_prompt + output) + MARGIN_TOKENS
    if options.checkpoint is not None:
        models = {"checkpoint": str(options.checkpoint), "draft": str(options.checkpoint / "draft")}
    else:
        from slice_suite.configs import write_slice

        target, draft = write_slice(folder, options.layers, options.preset)
        models = {"checkpoint": str(target), "draft": str(draft), "load_format": "dummy", "routing": "uniform"}
        models |= {"synthetic_acceptance": "3.0"}
    values = models | {
        "device": options.device,
        "speculation_policy": "fixed",
        "max_model_len": str(longest),
        "kv_tokens": str(options.streams * (options.stream_prompt + output + MARGIN_TOKENS) + 2 * longest),
        "max_num_seqs": str(options.streams + 1),
        "capture_batch_sizes": str(options.streams + 1),
        "max_num_batched_tokens": str(options.max_num_batched_tokens),
        "max_speculative_tokens": str(options.k),
        "num_speculative_tokens": str(options.k),
    }
    return ServingSettings.from_parameters(values, {}), options.rank_of


def stream_tokens(options: argparse.Namespace) -> int:
    """More tokens than a stream gets while all prompts come in."""
    fewest = min(rows or options.max_num_batched_tokens for rows in options.rows)
    steps = options.prompts * (-(-options.prompt_tokens // fewest) + 4) + options.rounds_alone
    return int((options.k + 1) * (steps + 20))


def load(settings: ServingSettings, num_ranks: int) -> tuple[Any, Any]:
    from kimi_backend.runners.load.loading import load_pair

    if num_ranks == 1:
        return load_pair(settings)
    from slice_suite.one_of_ranks import load_one_of_ranks

    return load_one_of_ranks(settings, num_ranks, 0.0)


def measure(
    options: argparse.Namespace, settings: ServingSettings, target: Any, draft: Any, rows: int, num_ranks: int
) -> dict[str, Any]:
    """One engine, its streams alone and beside the prompts."""
    limits = dataclasses.replace(
        scheduler_settings(settings), max_prompt_tokens_beside_decode=rows, enable_prefix_cache=False
    )
    engine = Engine(target, draft, settings=limits)
    engine.start()
    try:
        engine.wait_until_ready(READY_S)
        submit = Submitter(engine, target.describe().vocab_size // num_ranks, options.k)
        submit(options.prompt_tokens, 1).wait(1)  # compiles and allocates what eager steps need
        streams = [submit(options.stream_prompt, stream_tokens(options)) for _ in range(options.streams)]
        for stream in streams:
            stream.wait(10)
        begun = time.perf_counter()
        streams[0].wait(len(streams[0].times) + options.rounds_alone)
        came = time.perf_counter()
        waits = []
        for _ in range(options.prompts):
            sent = time.perf_counter()
            waits.append(submit(options.prompt_tokens, 1).wait(1) - sent)
        ended = time.perf_counter()
    finally:
        engine.stop()
    alone = [gap for stream in streams for gap in stream.gaps(begun, came)]
    beside = [gap for stream in streams for gap in stream.gaps(came, ended)]
    found = {"rows": rows, "alone": percentiles(alone), "beside": percentiles(beside)}
    factors = {name: round(found["beside"][name] / found["alone"][name], 2) for name in ("p50_ms", "p99_ms")}
    return found | {
        "factor": factors,
        "p99_of_alone_p50": round(found["beside"]["p99_ms"] / found["alone"]["p50_ms"], 2),
        "first_token_s": [round(wait, 3) for wait in waits],
        "prompt_tokens_a_s": round(options.prompt_tokens / statistics.median(waits)),
    }


class Submitter:
    """Sends requests of random tokens."""

    def __init__(self, engine: Engine, vocab_size: int, k: int) -> None:
        self._engine, self._vocab_size, self._k = engine, vocab_size, k
        self._rng = np.random.default_rng(0)
        self._count = 0

    def __call__(self, num_prompt: int, num_output: int) -> Heard:
        self._count += 1
        prompt = self._rng.integers(min(1000, self._vocab_size // 2), self._vocab_size, num_prompt)
        heard = Heard()
        request = GenerateRequest(
            request_id=str(self._count),
            prompt_token_ids=tuple(prompt.tolist()),
            sampling=SamplingParams(max_tokens=num_output, temperature=1.0, seed=self._count, ignore_eos=True),
            num_speculative_tokens=self._k,
        )
        self._engine.submit(request, heard)
        return heard


def percentiles(gaps: list[float]) -> dict[str, float]:
    if len(gaps) < 2:
        return {"p50_ms": float("nan"), "p99_ms": float("nan"), "max_ms": float("nan"), "count": len(gaps)}
    cuts = statistics.quantiles(gaps, n=100, method="inclusive")
    return {
        "p50_ms": round(cuts[49], 2),
        "p99_ms": round(cuts[98], 2),
        "max_ms": round(max(gaps), 2),
        "count": len(gaps),
    }


if __name__ == "__main__":
    main()
