"""Does the adaptive choice of k lose to the best fixed k? kimi-nano's own acceptance, replayed over times from a table.

    python benchmarks/replayed_policy.py [--temperatures 0 0.6 1] [--streams 1 4 8] [--costs FILE] [--json OUT]

What `speculation_policy.py` measures through servers, without what else a machine does: the pair writes each text once
in this process, and its draft proposes at every place (`lookup_suite.recorded`); then the adaptive policy and each
fixed k run over these texts in rounds that take what the table says, with noise for the policy to learn from. Each
start is an engine that has seen nothing, over the texts in an order of its own. --costs: {"target": …, "draft": …,
"host_s": …, "way_s": …}, by default those that `nano_costs.py` wrote of kimi-nano on a CPU.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from kimi_backend.config.settings import ServingSettings
from kimi_backend.spec_decode.adaptive_policy import AdaptivePolicy
from kimi_backend.spec_decode.controller import SpeculationController
from kimi_backend.spec_decode.round_times import Round
from kimi_backend.spec_decode.step_times import StepShape, StepTimes
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS
from kimi_backend.types.step_costs import StepCosts
from lookup_suite.recorded import RecordedText, record
from serving_suite.side_by_side import NANO, PROMPTS, provenance

COSTS = Path(__file__).parent / "results" / "cpu_nano_costs.json"
KS = (0, 1, 2, 3, 4, 5, 7)
NUM_TEXTS, NUM_TOKENS, COUNTED_TOKENS = 8, 160, 128
NOISE = 0.05
REQUESTS_A_STREAM = 4
"""A run that ends as soon as its streams are full would compare little but its end."""
BAR = 0.97


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--starts", type=int, default=6)
    parser.add_argument("--costs", type=Path, default=COSTS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    machine = Machine.read(args.costs)
    report: dict[str, Any] = {**provenance(), "date": time.strftime("%Y-%m-%d %H:%M"), "cells": []}
    for temperature in args.temperatures:
        texts = recorded_texts(temperature)
        for streams in args.streams:
            cell = {
                "temperature": temperature,
                "streams": streams,
                **measure(machine, texts, temperature, streams, args),
            }
            report["cells"].append(cell)
            print(json.dumps(cell), flush=True)
            if args.json:
                args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def recorded_texts(temperature: float) -> list[list[int]]:
    """[texts][places] draft tokens that are kept there, from the first verify's place on to the last one with all."""
    settings = ServingSettings(checkpoint=str(NANO), draft=str(NANO / "draft"), device="cpu", max_model_len=1024)
    prompts = [load_tokenizer(str(NANO)).encode(prompt) for prompt in PROMPTS]
    texts = [RecordedText(prompts[seed % len(prompts)], [], temperature) for seed in range(NUM_TEXTS)]
    record(settings, texts, NUM_TOKENS)
    return [[text.kept(place) for place in range(1, NUM_TOKENS - MAX_SPECULATIVE_TOKENS)] for text in texts]


def measure(
    machine: "Machine", texts: list[list[int]], temperature: float, streams: int, args: argparse.Namespace
) -> dict[str, Any]:
    """The fixed ks, and the policy from several starts: its first tokens, and the same texts once more."""
    texts = texts * -(-REQUESTS_A_STREAM * streams // len(texts))
    fixed = {k: Replay(machine, streams, k, temperature).run(texts) for k in KS}
    best = max(fixed, key=lambda k: fixed[k])
    first, later = [], []
    for seed in range(args.starts):
        rng = np.random.default_rng(seed)
        order = [texts[place] for place in rng.permutation(len(texts))]
        of_best = Replay(machine, streams, best, temperature).run(order)
        policy = AdaptivePolicy(machine.target, machine.draft)
        for found in (first, later):
            found.append(Replay(machine, streams, policy, temperature, rng).run(order) / of_best)
    return {
        "fixed": {k: round(rate) for k, rate in fixed.items()},
        "best_k": best,
        "first": [round(statistics.mean(first), 3), round(min(first), 3)],
        "later": [round(statistics.mean(later), 3), round(min(later), 3)],
        "meets_bar": statistics.mean(first) >= BAR,
    }


steps_of = cache(StepTimes)


@dataclass(frozen=True, slots=True)
class Machine:
    """The costs of rounds."""

    target: StepCosts
    draft: StepCosts
    host_s: float
    way_s: float

    @classmethod
    def read(cls, path: Path) -> "Machine":
        values = json.loads(path.read_text(encoding="utf-8"))
        # A table that was timed before rows had a price over long contexts: rounds here run over those of the table.
        found = (
            {"row_context_us": [0.0] * len(values[name]["num_seqs"])} | values[name] for name in ("target", "draft")
        )
        target, draft = (StepCosts.from_json(json.dumps(costs)) for costs in found)
        return cls(target, draft, values["host_s"], values["way_s"])

    def steps(self, target: StepShape, draft: StepShape | None) -> tuple[float, float]:
        """Seconds of both."""
        times, context_len = steps_of(self.target), target.num_context_tokens / target.num_seqs
        target_s = float(sum(times.fixed_and_variable(target.num_seqs, target.num_rows, target.longest, context_len)))
        if draft is None:
            return target_s, 0.0
        times, context_len = steps_of(self.draft), draft.num_context_tokens / draft.num_seqs
        extended = times.fixed_and_variable(draft.num_seqs, draft.num_rows, 1, context_len)
        return target_s, float(sum(extended) + times.proposals(draft.num_seqs, draft.num_proposals, context_len))


@dataclass(slots=True)
class Request:
    """A request that runs."""

    text: list[int]
    controller: SpeculationController
    place: int = 0
    num_proposed: int = 0
    """Draft tokens that it verifies next."""


@dataclass(slots=True)
class Replay:
    """Requests one after another over so many streams. Each verifies what was drafted in the round before."""

    machine: Machine
    streams: int
    policy: AdaptivePolicy | int
    """The policy, or a fixed k."""
    temperature: float
    rng: np.random.Generator | None = None
    num_tokens: int = 0
    seconds: float = 0.0

    def run(self, texts: Sequence[list[int]]) -> float:
        """Tokens a second. texts: how many draft tokens would be kept at each place."""
        waiting, running = list(texts), list[Request]()
        while waiting or running:
            while waiting and len(running) < self.streams:
                running.append(self._start(waiting.pop(0), running, len(waiting)))
            self._round(running)
            running = [request for request in running if request.place < COUNTED_TOKENS]
        return self.num_tokens / self.seconds

    def _start(self, text: list[int], running: list[Request], num_waiting: int) -> Request:
        request = Request(text, SpeculationController(7, self.temperature))
        if isinstance(self.policy, AdaptivePolicy):
            num_expected = min(self.streams, len(running) + 1 + num_waiting)
            self.policy.admit(
                request.controller, [r.controller for r in running], num_expected, 64 * (len(running) + 1)
            )
        return request

    def _round(self, running: list[Request]) -> None:
        num_seqs, num_context = len(running), 64 * len(running)
        wanted = self._choose(running, num_context)
        uses = [request.controller.uses_draft and self.policy != 0 for request in running]
        checked, num_kept = [request.num_proposed for request in running], 0
        for request, is_used, count in zip(running, uses, wanted, strict=True):
            there = request.text[request.place] if request.place < len(request.text) else 0
            kept = min(there, request.num_proposed)
            if request.num_proposed:
                request.controller.record(request.num_proposed, kept)
            request.place += kept + 1
            self.num_tokens += kept + 1
            num_kept += kept if is_used else 0
            request.num_proposed = count if is_used else 0
        target = StepShape(num_seqs, num_seqs + sum(checked), max(checked) + 1, num_context)
        num_drafting, depth = sum(uses), max(request.num_proposed for request in running)
        draft = StepShape(num_drafting, num_drafting + num_kept, depth + 1, 64 * num_drafting, depth)
        self._take_time(target, draft if num_drafting else None)

    def _choose(self, running: list[Request], num_context: int) -> list[int]:
        if isinstance(self.policy, int):
            return [self.policy] * len(running)
        self.policy.begin_round([request.controller for request in running], len(running), num_context)
        return [request.controller.num_chosen_tokens for request in running]

    def _take_time(self, target: StepShape, draft: StepShape | None) -> None:
        target_s, draft_s = (seconds * self._noise() for seconds in self.machine.steps(target, draft))
        way_s = 0.0 if draft is None else self.machine.way_s
        total_s = target_s + draft_s + way_s + self.machine.host_s
        self.seconds += total_s
        if isinstance(self.policy, AdaptivePolicy):
            self.policy.end_round(
                Round(
                    target=target,
                    draft=draft,
                    total_s=total_s,
                    target_s=target_s,
                    draft_s=draft_s,
                    draft_wait_s=draft_s + way_s,
                    is_overlapped=False,
                )
            )

    def _noise(self) -> float:
        return 1.0 if self.rng is None else float(np.exp(self.rng.normal(0, NOISE)))


if __name__ == "__main__":
    main()
