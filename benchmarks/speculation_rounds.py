"""What a round takes by how it speculates and how long ago that changed: kimi-nano in one process, for a GPU.

    PYTHONPATH=kernels:backend:client python benchmarks/speculation_rounds.py [--streams 1 16] [--json OUT]

A policy that follows a script lets all requests draft 3, 1 or 2 tokens, only follow, or leave the draft, and notes each
round of decode rows alone. Then the adaptive policy serves the same requests, and what its own work takes between two
rounds is noted, apart from what it does while the device is at work.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from typing import Any

from kimi_backend.engine.engine import Engine
from kimi_backend.processes import freeze_what_is_loaded
from kimi_backend.spec_decode.adaptive_policy import AdaptivePolicy
from kimi_backend.spec_decode.controller import SpeculationController
from serving_suite.policy_rows import MOST_DRAFT_TOKENS
from serving_suite.side_by_side import add_common_options, provenance
from speculation_policy_in_process import EngineCase, make_prompts, serving_settings, start_engines

FOLLOWS, OUT = 0, -1
"""In place of a number of draft tokens: the draft only follows; nobody uses it."""
NAMES = {FOLLOWS: "only follows", OUT: "no draft"}
SCRIPT = ((24, 3), (8, FOLLOWS), (24, 3), (24, 1), (24, 2), (24, 3), (16, OUT), (24, 1), (16, OUT))
"""(rounds, what all do), again and again."""


class ScriptedPolicy:
    """Does what the script says, and keeps the rounds' times."""

    def __init__(self) -> None:
        self.num_chosen_tokens = 0
        self.rounds: dict[tuple[str, str], list[float]] = defaultdict(list)
        """Seconds by what is done and `after`."""
        self._part, self._index = 0, -1
        self._begin_s = 0.0

    def admit(
        self, controller: SpeculationController, running: list[SpeculationController], num_sequences: int
    ) -> None:
        self._set([controller])

    def begin_round(self, controllers: list[SpeculationController], num_sequences: int) -> None:
        self._begin_s = time.perf_counter()
        self._index += 1
        if self._index >= SCRIPT[self._part][0]:
            self._part, self._index = (self._part + 1) % len(SCRIPT), 0
        self._set(controllers)

    def think(self) -> None:
        pass

    def end_round(self, *, is_pure_decode: bool, draft_s: float, target_s: float) -> None:
        if is_pure_decode:
            seconds = time.perf_counter() - self._begin_s
            after = str(self._index) if self._index < 3 else "later"
            self.rounds[name_of(SCRIPT[self._part][1]), after].append(seconds)

    def _set(self, controllers: Iterable[SpeculationController]) -> None:
        k = SCRIPT[self._part][1]
        for controller in controllers:
            controller.uses_draft, controller.num_chosen_tokens = k != OUT, max(k, 0)


class TimedPolicy(AdaptivePolicy):
    """The adaptive one, and what it takes of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.between_s, self.meanwhile_s, self.num_rounds = 0.0, 0.0, 0

    def begin_round(self, controllers: list[SpeculationController], num_sequences: int) -> None:
        start = time.perf_counter()
        super().begin_round(controllers, num_sequences)
        self.between_s += time.perf_counter() - start

    def think(self) -> None:
        start = time.perf_counter()
        super().think()
        self.meanwhile_s += time.perf_counter() - start

    def end_round(self, *, is_pure_decode: bool, draft_s: float, target_s: float) -> None:
        start = time.perf_counter()
        super().end_round(is_pure_decode=is_pure_decode, draft_s=draft_s, target_s=target_s)
        self.between_s += time.perf_counter() - start
        self.num_rounds += 1


def name_of(k: int) -> str:
    return NAMES.get(k, f"k = {k}")


def serve(engine: Engine, policy: Any, prompts: list[tuple[int, ...]], streams: int, args: argparse.Namespace) -> None:
    """So many requests at a time under a policy."""
    core = engine._loop.core
    assert core is not None
    core.scheduler.policy = policy
    EngineCase("", engine, MOST_DRAFT_TOKENS, prompts).run(
        args.temperatures[0], streams, max(2 * streams, 4), args.max_tokens
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.set_defaults(max_tokens=512, slice=0)
    args = parser.parse_args()
    results = []
    with ExitStack() as stack:
        settings = serving_settings(args, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        prompts, engine = make_prompts(args, settings), start_engines(stack, settings)["fixed"]
        freeze_what_is_loaded()
        for streams in args.streams:
            scripted, timed = ScriptedPolicy(), TimedPolicy()
            serve(engine, scripted, prompts, streams, args)
            serve(engine, timed, prompts, streams, args)
            for (what, after), seconds in sorted(scripted.rounds.items()):
                ms = [1e3 * s for s in seconds]
                row = {"streams": streams, "round": what, "after": after, "count": len(ms)}
                results.append(row | {"median_ms": round(median(ms), 3), "mean_ms": round(fmean(ms), 3)})
                print(json.dumps(results[-1]), flush=True)
            host = {
                "streams": streams,
                "adaptive_us_between_rounds": round(1e6 * timed.between_s / timed.num_rounds, 1),
                "adaptive_us_meanwhile": round(1e6 * timed.meanwhile_s / timed.num_rounds, 1),
            }
            results.append(host)
            print(json.dumps(host), flush=True)
    if args.json:
        args.json.write_text(json.dumps({**provenance(), "rounds": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
