"""Is k chosen well from costs that are measured once? Slices of Kimi-K2.5 at full width on one GPU.

    PYTHONPATH=kernels:backend python benchmarks/k_from_costs.py --draft bf16,cheap --out results
    PYTHONPATH=kernels:backend python benchmarks/k_from_costs.py --draft cheap --batches 1,16,64 --ks 0,3,7

First both models time their steps, as at a server's first start. Then rounds of every k and batch size run once, and
the table's prediction stands beside each. Draft tokens are accepted at random with chances by position that do not
depend on k, in four strengths. Of the adaptive policy, what it drafts and the time are measured, from the first request
of an engine that has seen nothing. Tokens are those that the chances give on the average, for what it drafted and for
each k alike: luck of a few hundred rounds would hide what is looked for. Weights are random and routing is uniform.

A card at its power limit runs slower the longer it has not rested. So the runs of a batch size follow one another
without a pause, of each k the last two thirds of its rounds count, and all of the policy's.
"""

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kimi_backend.checkpoint.presets import Preset
from kimi_backend.config.settings import ServingSettings
from kimi_backend.engine.engine import Engine
from kimi_backend.parallel import SingleRank
from kimi_backend.runners.load import loading
from kimi_backend.runners.load.opened_checkpoints import Checkpoints
from kimi_backend.runners.load.placement import place
from kimi_backend.runners.ranks.workers import NO_WORKERS
from kimi_backend.spec_decode.round_times import RoundTimes
from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS
from kimi_kernels.synthetic_sets import chances_of
from slice_suite.configs import write_slice
from slice_suite.in_process import run_batch
from slice_suite.recording import Round

CHANCES = (0.85, 0.67, 0.48)
"""Chances of draft tokens 1, 2, 3 where those before were accepted; each later one is `synthetic_sets.LATER_SHARE` of
the one before."""
LENGTHS = (1.2, 1.9, 3.0, 3.2)
"""Tokens a round with k = 3 that the chances are scaled to."""
MOST_OFF, LEAST_OF_BEST, LEAST_OF_PLAIN = 0.03, 0.97, 0.98
DRAFTS: dict[str, dict[str, str]] = {
    "bf16": {},
    "cheap": {"draft_quantization": "fp8", "draft_head_quantization": "int4", "draft_vocab": "32768"},
}
FEW = 4
"""Batches of so few sequences run twice as many rounds: luck counts for more in them."""
MARGIN_TOKENS = 16


def main() -> None:
    options = parse_options()
    document: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "chances": CHANCES,
        "drafts": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        pairs = Pairs(options, Path(folder))
        for name in options.draft:
            for result in measure_draft(name, pairs, options):
                document["drafts"][name] = result
                save(options, document)
    print(verdict(document))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    names = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--preset", type=Preset, default=Preset.KIMI_K25, help="tiny runs on a CPU")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--draft", type=names, default=["bf16"], help="bf16, cheap, or both with a comma")
    parser.add_argument("--batches", type=numbers, default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--ks", type=numbers, default=list(range(8)), help="rounds that are measured; 0 among them")
    parser.add_argument("--lengths", type=lambda text: [float(part) for part in text.split(",")], default=list(LENGTHS))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=0.8, help="of each fixed k, in rounds of the predicted time")
    parser.add_argument("--fewest-rounds", type=int, default=24, help="of each fixed k, whatever they take")
    parser.add_argument("--adaptive-rounds", type=int, default=120)
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE", help="any other setting")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    return parser.parse_args()


def save(options: argparse.Namespace, document: dict[str, Any]) -> None:
    """Write the document after every case, so that an interrupted run leaves what it has."""
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"k_from_costs_{'_'.join(options.draft)}.json"
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


class Pairs:
    """One target, and each form of the draft in turn."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self.settings = self.target = self.draft = None
        self._plain_rounds: dict[int, FixedRound] = {}

    def load(self, name: str) -> None:
        """Make it the draft of the pair."""
        self.settings = settings = slice_settings(name, self._options, self._folder)
        if self.target is None:
            self.target, self.draft = loading.load_pair(settings)
        else:
            self.draft.close()
            target, placement = self.target, place(settings)
            self.draft = loading._load_draft(
                settings,
                Checkpoints.open(settings, placement),
                placement,
                loading._recorder(settings, placement),
                SingleRank(),
                NO_WORKERS,
                target._model.get_embed_and_head(),
                target.aux_buffer,
                target.table,
            )
        gc.collect()
        gc.freeze()  # as in a server: a look at all that is loaded takes as long as many rounds

    def run(self, policy: str, k: int, batch: int, rounds: int, **more: Any) -> list[Round]:
        """Run so many rounds of equal requests, none of which ends in them."""
        found = run_batch(
            self.target,
            self.draft if k else None,
            dataclasses.replace(self.settings, speculation_policy=policy),
            batch_size=batch,
            prompt_len=self._options.prompt,
            num_output_tokens=(k + 1) * (rounds + MARGIN_TOKENS),
            num_speculative_tokens=k,
            async_scheduling=True,
            temperature=1.0,
            seed=k,
            num_rounds=rounds,
            **more,
        )
        return [item for item in found if item.is_decode and item.num_seqs == batch][:rounds]

    def fixed_round(self, k: int, batch: int, rounds: int) -> "FixedRound":
        """Times rounds that follow others; those without a draft are the same for each."""
        if k == 0 and batch in self._plain_rounds:
            return self._plain_rounds[batch]
        counted = self.run("fixed", k, batch, rounds)[rounds // 3 :]
        ends, launches = ([getattr(item, name) for item in counted] for name in ("target_end_s", "target_launched_s"))
        host_ms = statistics.median(after - end for end, after in zip(ends, launches[1:], strict=False))
        found = FixedRound(1e3 * float(np.mean(np.diff(ends))), 1e3 * host_ms)
        if k == 0:
            self._plain_rounds[batch] = found
        return found


class FixedRound(NamedTuple):
    """Milliseconds."""

    whole: float
    host: float
    """The time from the target's reply to the end of its next launch; below 0 where that is behind the one before
    it."""


def measure_draft(name: str, pairs: Pairs, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Everything of one form of the draft, once more after each case."""
    started = time.perf_counter()
    pairs.load(name)
    loaded_s, started = time.perf_counter() - started, time.perf_counter()
    costs = {"target": pairs.target.measure_costs(), "draft": pairs.draft.measure_costs()}
    timed_s = time.perf_counter() - started
    print(f"{name}: loaded in {loaded_s:.1f} s, steps timed in {timed_s:.1f} s", flush=True)
    result: dict[str, Any] = {"loaded_s": round(loaded_s, 1), "timed_s": round(timed_s, 1)}
    result["settings"] = {name: value for name, value in dataclasses.asdict(pairs.settings).items() if value}
    result["costs"] = {role: dataclasses.asdict(of_role) for role, of_role in costs.items()}
    result |= {"rounds": [], "adaptive": []}
    for batch in options.batches:
        times = RoundTimes(costs["target"], costs["draft"])
        for found in fixed_rounds(pairs, times, batch, options):
            result["rounds"].append(found)
            print(json.dumps(found), flush=True)
        for found in adaptive_runs(pairs, batch, result["rounds"], options):
            result["adaptive"].append(found)
            print(json.dumps({name: value for name, value in found.items() if name != "trace"}), flush=True)
            yield result


def slice_settings(name: str, options: argparse.Namespace, folder: Path) -> ServingSettings:
    """Room for the largest case."""
    target, draft = write_slice(folder, options.layers, options.preset)
    longest = options.prompt + 8 * (2 * options.adaptive_rounds + 2 * MARGIN_TOKENS)
    values = {
        "checkpoint": str(target),
        "draft": str(draft),
        "load_format": "dummy",
        "routing": "uniform",
        "synthetic_chances": ",".join(map(str, CHANCES)),
        "max_model_len": str(longest),
        "kv_tokens": str(max(options.batches) * (longest + 128)),
        "max_num_seqs": str(max(options.batches)),
        "capture_batch_sizes": ",".join(map(str, options.batches)),
        "max_num_batched_tokens": str(max(2048, 8 * max(options.batches))),
    }
    values |= DRAFTS[name] if options.preset is not Preset.TINY else {}
    return ServingSettings.from_parameters(values | dict(item.split("=", 1) for item in options.set), {})


def fixed_rounds(pairs: Pairs, times: RoundTimes, batch: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each k, the longest rounds first, and the prediction: of the table, and of the host's time in that run."""
    times.assume_overlapped()
    for k in sorted(options.ks, reverse=True):
        predicted_ms = 1e3 * predicted_s(times, batch, k, batch * options.prompt)
        rounds = max(options.fewest_rounds, min(round(1e3 * options.seconds / predicted_ms), options.adaptive_rounds))
        found = pairs.fixed_round(k, batch, rounds)
        times.assume_overlapped(1e-3 * max(found.host, 0.0))
        num_context_tokens = round(batch * (options.prompt + rounds))
        predicted_ms = 1e3 * predicted_s(times, batch, k, num_context_tokens)
        entry = {"batch": batch, "k": k, "round_ms": round(found.whole, 4), "host_ms": round(found.host, 4)}
        yield entry | {"predicted_ms": round(predicted_ms, 4), "off": round(predicted_ms / found.whole - 1, 4)}


def predicted_s(times: RoundTimes, batch: int, k: int, num_context_tokens: int) -> float:
    """A round in which all have k draft tokens."""
    if not k:
        return times.plain(batch, num_context_tokens)
    everyone, depth, rows = np.array([batch]), np.array([k]), np.array([batch * k])
    return float(times.drafting(batch, everyone, depth, rows, rows * 1.0, num_context_tokens)[0])


def adaptive_runs(
    pairs: Pairs, batch: int, fixed: list[dict[str, Any]], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """The policy in each strength of the draft, beside what each fixed k would give."""
    chances_here = pairs.target._kernels.sample_tokens.chances
    of_batch = {item["k"]: item["round_ms"] for item in fixed if item["batch"] == batch}
    most = options.adaptive_rounds * (2 if batch <= FEW else 1)
    for length in options.lengths:
        chances = scaled_chances(length)
        chances_here.copy_(chances_of(chances))
        rates = {k: 1e3 * batch * emitted(chances, k) / round_ms for k, round_ms in of_batch.items()}
        ended = Ended()
        counted = pairs.run("adaptive", 7, batch, most, at_end=ended)
        rate, later = (tokens_per_s(part, chances) for part in (counted, counted[len(counted) // 3 :]))
        best = max(rates, key=lambda k: rates[k])
        rows = statistics.mean(item.num_rows / batch - 1 for item in counted)
        yield {
            "length": length,
            "batch": batch,
            "fixed": {k: round(value) for k, value in rates.items()},
            "best_k": best,
            "adaptive": round(rate),
            "mean_k": round(rows, 2),
            "factors": ended.factors,
            "slow_rounds": slow_rounds(counted),
            "later_of_best": round(later / rates[best], 3),
            "of_best": round(rate / rates[best], 3),
            "of_plain": round(rate / rates[0], 3) if 0 in rates else None,
            "trace": trace(counted),
        }
    chances_here.copy_(chances_of(CHANCES))


class Ended:
    """Keeps what an engine's policy has learned."""

    factors: Sequence[float] = ()

    def __call__(self, engine: Engine) -> None:
        assert engine._loop.core is not None
        self.factors = engine._loop.core.scheduler.policy.times.factors


def trace(rounds: Sequence[Round]) -> list[list[Any]]:
    """[milliseconds, {draft tokens: sequences}] of each round."""
    ends = [item.target_end_s for item in rounds]
    counts = [dict(sorted(Counter(item.num_draft_tokens).items())) for item in rounds[1:]]
    return [[round(1e3 * ms, 3), of_round] for ms, of_round in zip(np.diff(ends).tolist(), counts, strict=True)]


def tokens_per_s(rounds: Sequence[Round], chances: Sequence[float]) -> float:
    """Tokens a second of rounds one behind another, with as many as such draft tokens give on the average."""
    by_k = [emitted(chances, k) for k in range(MAX_SPECULATIVE_TOKENS + 1)]
    num_tokens = sum(by_k[k] for item in rounds[1:] for k in item.num_draft_tokens)
    return num_tokens / (rounds[-1].target_end_s - rounds[0].target_end_s)


def slow_rounds(rounds: Sequence[Round]) -> float:
    """The share of the time that rounds of more than 1.5 times the median take beyond that."""
    seconds = np.diff([item.target_end_s for item in rounds])
    late = np.maximum(seconds - 1.5 * np.median(seconds), 0).sum()
    return round(float(late / seconds.sum()), 4)


def scaled_chances(length: float) -> tuple[float, ...]:
    """`CHANCES` times what lets k = 3 emit so many tokens a round; none above 1."""
    low, high = 0.0, 3.0
    for _ in range(60):
        scale = (low + high) / 2
        chances = [min(scale * chance, 1.0) for chance in CHANCES]
        low, high = (scale, high) if emitted(chances, len(CHANCES)) < length else (low, scale)
    return tuple(min(scale * chance, 1.0) for chance in CHANCES)


def emitted(chances: Sequence[float], k: int) -> float:
    """Tokens that a round of k draft tokens emits on the average."""
    return 1 + float(np.cumprod(chances_of(chances)[0].tolist()[:k]).sum())


def verdict(document: dict[str, Any]) -> str:
    """A text of what is missed, and the worst of each."""
    lines = []
    for name, result in document["drafts"].items():
        wrong = [item for item in result["rounds"] if not abs(item["off"]) <= MOST_OFF]
        slow = [run for run in result["adaptive"] if run["of_best"] < LEAST_OF_BEST]
        losing = [run for run in result["adaptive"] if (run["of_plain"] or 1) < LEAST_OF_PLAIN]
        off = max((abs(item["off"]) for item in result["rounds"]), default=0)
        least = min((run["of_best"] for run in result["adaptive"]), default=1)
        num_rounds, num_runs = len(result["rounds"]), len(result["adaptive"])
        lines += [
            f"{name}: {len(wrong)} of {num_rounds} predictions are off by more than {MOST_OFF:.0%} (worst {off:.1%});",
            f"  {len(slow)} of {num_runs} adaptive runs are below {LEAST_OF_BEST} of the best k (worst {least});",
            f"  {len(losing)} are below {LEAST_OF_PLAIN} of k = 0.",
        ]
        lines += [f"  off: B={item['batch']} k={item['k']} {item['off']:+.1%}" for item in wrong]
        lines += [f"  slow: {run['length']} B={run['batch']} {run['of_best']} (k {run['mean_k']})" for run in slow]
        lines += [f"  below k = 0: {run['length']} B={run['batch']} {run['of_plain']}" for run in losing]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
