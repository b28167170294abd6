"""Measure a cheaper draft's acceptance, and that it costs no token: kimi-nano through the engine, in this process.

    PYTHONPATH=kernels:backend python benchmarks/draft_acceptance.py out/nano-data [--num-prompts 40] [--out results]

Each variant of the draft (fewer tokens in its head, weights rounded at load) completes the same held-out prompts, which
`python -m kimi_nano prepare` writes, greedily and at temperature 1. Texts must equal those without speculation, token
by token. What a variant saves in time is another question: benchmarks/draft_cost.py.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kimi_backend.cli.bench_in_process import BenchLoad, run_bench
from kimi_backend.config.settings import ServingSettings
from kimi_backend.types.request import SamplingParams

NANO = Path(__file__).parents[1] / "demo" / "kimi-nano"
TEMPERATURES = (0.0, 1.0)
AS_IT_IS = "as it is"
VARIANTS: dict[str, dict[str, Any]] = {
    AS_IT_IS: {},
    "fp8": {"draft_quantization": "fp8"},
    "int4": {"draft_quantization": "int4"},
    "int4 head": {"draft_head_quantization": "int4"},
    "fp8, int4 head": {"draft_quantization": "fp8", "draft_head_quantization": "int4"},
    "2,048 of 4,096 tokens": {"draft_vocab": 2048},
    "1,024 of 4,096 tokens": {"draft_vocab": 1024},
    "fp8, int4 head, 2,048 tokens": {
        "draft_quantization": "fp8",
        "draft_head_quantization": "int4",
        "draft_vocab": 2048,
    },
    "int4, 2,048 tokens": {"draft_quantization": "int4", "draft_vocab": 2048},
    "int4, 1,024 tokens": {"draft_quantization": "int4", "draft_vocab": 1024},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One variant at one temperature."""

    variant: str
    temperature: float
    acceptance_length: float
    """1 + mean draft tokens accepted a round, over all rounds."""
    lengths: tuple[float, ...]
    """The same for each prompt."""
    per_position: tuple[float, ...]
    num_equal_texts: int

    def __str__(self) -> str:
        error = statistics.stdev(self.lengths) / len(self.lengths) ** 0.5
        positions = " ".join(f"{100 * rate:3.0f}%" for rate in self.per_position)
        return (
            f"{self.variant:28} {self.temperature:4g}  {self.acceptance_length:6.3f} ± {error:.3f}  {positions:16}"
            f"  {self.num_equal_texts} of {len(self.lengths)}"
        )


def change(result: Result, whole: Result) -> str:
    """Format the acceptance length's change against the draft as it is, with its standard error over the prompts."""
    differences = [a - b for a, b in zip(result.lengths, whole.lengths, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5
    percent = 100 / whole.acceptance_length
    return f"{percent * (result.acceptance_length - whole.acceptance_length):+.1f} ± {percent * error:.1f} %"


def load_of(temperature: float, num_tokens: int, num_draft_tokens: int) -> BenchLoad:
    sampling = SamplingParams(temperature=temperature, seed=0, max_tokens=num_tokens, ignore_eos=True)
    return BenchLoad(sampling=sampling, num_speculative_tokens=num_draft_tokens)


def texts(report: dict[str, Any]) -> list[list[int]]:
    errors = [request["error"] for request in report["requests"] if request["error"]]
    if errors:
        raise SystemExit(f"{len(errors)} requests failed, the first with: {errors[0]}")
    return [request["token_ids"] for request in report["requests"]]


def result_of(
    variant: str, temperature: float, report: dict[str, Any], written: list[list[int]], expected: list[list[int]]
) -> Result:
    rounds = [request["statistics"]["speculative_decoding"] for request in report["requests"]]
    return Result(
        variant=variant,
        temperature=temperature,
        acceptance_length=report["acceptance_length"],
        lengths=tuple(1 + r["num_accepted_draft_tokens"] / r["num_spec_steps"] for r in rounds),
        per_position=tuple(rate or 0.0 for rate in report["acceptance_per_position"]),
        num_equal_texts=sum(ours == plain for ours, plain in zip(written, expected, strict=True)),
    )


def write_prompts(data: Path, num_prompts: int, file: Path) -> None:
    """Held-out prompts as the JSON lines that `kimi bench` reads."""
    prompts = json.loads((data / "held_out.json").read_text())["prompts"][:num_prompts]
    file.write_text("\n".join(json.dumps({"input_ids": prompt["token_ids"]}) for prompt in prompts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("data", type=Path, help="what `python -m kimi_nano prepare` wrote")
    parser.add_argument("--checkpoint", type=Path, default=NANO)
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--num-tokens", type=int, default=128, help="new tokens a prompt")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="may be given again; all if not given")
    parser.add_argument("--temperature", action="append", type=float, help="may be given again; 0 and 1 if not given")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-k", type=int, default=3, help="draft tokens a round")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--kernels", default="auto", help="kernel set; texts are equal only where it is row-invariant")
    parser.add_argument("--out", type=Path, help="folder for draft_acceptance.json")
    options = parser.parse_args()
    settings = ServingSettings(
        checkpoint=str(options.checkpoint),
        draft=str(options.checkpoint / "draft"),
        device=options.device,
        kernels=options.kernels,
        cpu_threads=options.threads,
        speculation_policy="fixed",
        max_num_seqs=32,
        max_model_len=1024,
    )
    results = []
    print(f"{'variant':28} temp  acceptance length  at least 1, 2, …  equal texts", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        write_prompts(options.data, options.num_prompts, prompts)
        for temperature in options.temperature or TEMPERATURES:
            plain = run_bench(settings, prompts, load_of(temperature, options.num_tokens, 0))
            for variant in options.variant or VARIANTS:
                load = load_of(temperature, options.num_tokens, options.k)
                report = run_bench(dataclasses.replace(settings, **VARIANTS[variant]), prompts, load)
                result = result_of(variant, temperature, report, texts(report), texts(plain))
                results.append(result)
                whole = next((r for r in results if r.variant == AS_IT_IS and r.temperature == temperature), None)
                print(result, change(result, whole) if whole and whole != result else "", flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        content = {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d"), "k": options.k}
        content["results"] = [asdict(result) for result in results]  # type: ignore[assignment]
        (options.out / "draft_acceptance.json").write_text(json.dumps(content, indent=1))
    return 0 if all(result.num_equal_texts == len(result.lengths) for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
