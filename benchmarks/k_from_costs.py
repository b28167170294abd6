"""Is k chosen well from costs that are measured once? Slices of Kimi-K2.5 at full width on one GPU.

    PYTHONPATH=kernels:backend python benchmarks/k_from_costs.py --draft bf16,cheap --out results
    PYTHONPATH=kernels:backend python benchmarks/k_from_costs.py --draft cheap --batches 1,16,64 --ks 0,3,7

First both models time their steps, as at a server's first start. Then, for each batch size, every fixed k and the
adaptive policy take turns, each for as long as any other, in an order that is turned around each time: a card at its
power limit runs slower the longer it has not rested, so a short run is no peer of a long one. Draft tokens are accepted
at random with chances by position that do not depend on k, in four strengths. Each adaptive run is an engine that has
seen nothing, and all its rounds count, as those of the fixed k beside it do; of the rounds that the table's predictions
are compared with, the last two thirds. Weights are random and routing is uniform.
"""

import argparse
import dataclasses
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from kimi_backend.types.step_costs import StepCosts
from kimi_kernels.synthetic_sets import chances_of
from slice_suite.card_watch import CardWatch
from slice_suite.configs import write_slice
from slice_suite.in_process import run_batch
from slice_suite.k_turns import CHANCES, Turn, compared, predicted, scaled_chances, verdict

LENGTHS = (1.2, 1.9, 3.0, 3.2)
"""Tokens a round with k = 3 that the chances are scaled to."""
DRAFTS: dict[str, dict[str, str]] = {
    "bf16": {},
    "cheap": {"draft_quantization": "fp8", "draft_head_quantization": "int4", "draft_vocab": "32768"},
}
SHORTEST_ROUND_S = 1.2e-3
MOST_OUTPUT_TOKENS = 12_000


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
        pairs.close()
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
    parser.add_argument("--seconds", type=float, default=1.2, help="of each turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE", help="any other setting")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    return parser.parse_args()


def save(options: argparse.Namespace, document: dict[str, Any]) -> None:
    """Write the document after every batch size, so that an interrupted run leaves what it has."""
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"k_from_costs_{'_'.join(options.draft)}.json"
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


class Pairs:
    """One target, and each form of the draft in turn."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self.settings = self.target = self.draft = None
        self._watch = CardWatch() if torch.cuda.is_available() else None

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()

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

    def turn(self, batch: int, k: int | None, chances: tuple[float, ...], seed: int) -> Turn:
        """Rounds of equal requests, none of which ends in them. k: None for the adaptive policy."""
        self.target._kernels.sample_tokens.chances.copy_(chances_of(chances))
        most, factors = MAX_SPECULATIVE_TOKENS if k is None else k, list[float]()

        def note_factors(engine: Engine) -> None:
            assert engine._loop.core is not None
            factors.extend(engine._loop.core.scheduler.policy.times.factors)

        found = run_batch(
            self.target,
            self.draft if most else None,
            dataclasses.replace(self.settings, speculation_policy="adaptive" if k is None else "fixed"),
            batch_size=batch,
            prompt_len=self._options.prompt,
            num_output_tokens=num_output_tokens(self._options),
            num_speculative_tokens=most,
            async_scheduling=True,
            temperature=1.0,
            seed=seed,
            seconds=self._options.seconds,
            at_end=note_factors if k is None else lambda engine: None,
        )
        turn = Turn([item for item in found if item.is_decode and item.num_seqs == batch], factors=factors)
        if self._watch is not None:
            turn.card = self._watch.between(turn.later[0].target_end_s, turn.later[-1].target_end_s)
        return turn


def num_output_tokens(options: argparse.Namespace) -> int:
    """More than a request makes in a turn: eight tokens in each of the shortest rounds."""
    return min(round(8 * options.seconds / SHORTEST_ROUND_S), MOST_OUTPUT_TOKENS)


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
        for role, found in measure_batch(pairs, batch, costs, options):
            result[role].append(found)
            shown = {name: value for name, value in found.items() if name not in ("trace", "card")}
            print(json.dumps(shown), flush=True)
        yield result


def measure_batch(
    pairs: Pairs, batch: int, costs: dict[str, StepCosts], options: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Any]]]:
    """All ways in turn: entries of `rounds`, one of each k, then of `adaptive`, one of each strength."""
    fixed: dict[int, list[Turn]] = {k: [] for k in sorted(options.ks, reverse=True)}
    adaptive: dict[float, list[Turn]] = {length: [] for length in options.lengths}
    ways = [*((k, 0.0, turns) for k, turns in fixed.items()), *((None, *item) for item in adaptive.items())]
    for number in range(options.turns):
        for k, length, turns in ways if number % 2 == 0 else reversed(ways):
            turns.append(pairs.turn(batch, k, scaled_chances(length) if length else CHANCES, seed=number))
    times = RoundTimes(costs["target"], costs["draft"])
    for k, turns in fixed.items():
        times.assume_overlapped(1e-3 * max(min(turn.host_ms for turn in turns), 0.0))
        num_rounds = min(len(turn.rounds) for turn in turns)
        num_tokens = sum(item.num_tokens for item in turns[0].rounds[: num_rounds * 2 // 3])
        predicted_ms = 1e3 * predicted_s(times, batch, k, batch * options.prompt + num_tokens)
        yield "rounds", predicted(batch, k, turns, predicted_ms)
    for length, turns in adaptive.items():
        yield "adaptive", compared(batch, length, fixed, turns)


def slice_settings(name: str, options: argparse.Namespace, folder: Path) -> ServingSettings:
    """Room for the largest case."""
    target, draft = write_slice(folder, options.layers, options.preset)
    longest = options.prompt + num_output_tokens(options)
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


def predicted_s(times: RoundTimes, batch: int, k: int, num_context_tokens: int) -> float:
    """A round in which all have k draft tokens."""
    if not k:
        return times.plain(batch, num_context_tokens)
    everyone, depth, rows = np.array([batch]), np.array([k]), np.array([batch * k])
    return float(times.drafting(batch, everyone, depth, rows, rows * 1.0, num_context_tokens)[0])


if __name__ == "__main__":
    main()
