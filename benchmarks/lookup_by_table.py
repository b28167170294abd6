"""Compares proposers by the rounds that they take, timed by a table: kimi-nano in this process.

    PYTHONPATH=benchmarks:demo python benchmarks/lookup_by_table.py [--loads completion edit records] [--num-prompts 16]

What `lookup.py` measures through a server, without what else a machine does. Texts, matches, proposals and choices are
real; the policy and the sums are told that each round took what the table says (`replayed_policy.Machine`).
"""

import argparse
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from kimi_backend.config.settings import ServingSettings
from kimi_backend.engine.engine import Engine
from kimi_backend.runners.load.loading import load_pair
from kimi_backend.serving.spec_ensemble_server import scheduler_settings
from kimi_backend.spec_decode.adaptive_policy import AdaptivePolicy
from kimi_backend.spec_decode.round_times import Round
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_backend.types.request import GenerateRequest, SamplingParams
from lookup_suite.loads import LoadPrompt, held_out_files, make_loads
from replayed_policy import COSTS, Machine
from serving_suite.side_by_side import NANO, provenance
from slice_suite.recording import RecordedTarget, Recording

PROPOSERS = ("eagle3", "lookup", "lookup+eagle3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", default=["completion", "edit", "records"])
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--costs", type=Path, default=COSTS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    loads = make_loads(held_out_files(), load_tokenizer(str(NANO)).encode, args.num_prompts)
    settings = ServingSettings(checkpoint=str(NANO), draft=str(NANO / "draft"), device="cpu", max_num_seqs=32)
    pair, machine = load_pair(settings), Machine.read(args.costs)
    report: dict[str, Any] = {**provenance(), "date": time.strftime("%Y-%m-%d %H:%M"), "cells": []}
    rates: dict[tuple[str, float], dict[str, float]] = {}
    for proposer in PROPOSERS:
        clocked = ClockedEngine(replace(settings, proposer=proposer), pair, machine)
        for temperature in args.temperatures:
            for load in args.loads:
                cell = clocked.run(loads[load], temperature, args.streams, args.max_tokens)
                rates.setdefault((load, temperature), {})[proposer] = cell["tokens_per_s"]
                report["cells"].append({"proposer": proposer, "load": load, "temperature": temperature, **cell})
                print(json.dumps(report["cells"][-1]), flush=True)
        clocked.engine.stop()
    for (load, temperature), of_cell in rates.items():
        both = of_cell["lookup+eagle3"] / max(of_cell["eagle3"], of_cell["lookup"])
        print(f"{load} at {temperature:g}: both make {both:.3f} of the better's tokens a second")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


class ClockedEngine:
    """An engine whose rounds take what a table says."""

    def __init__(self, settings: ServingSettings, pair: Any, machine: Machine) -> None:
        target, draft = pair
        target._costs, draft._costs = machine.target, machine.draft
        self._machine, self._recording = machine, Recording()
        self.engine = Engine(
            RecordedTarget(target, self._recording),
            draft if settings.chosen_proposer.uses_draft else None,
            settings=scheduler_settings(settings),
            eos_token_ids=load_tokenizer(settings.checkpoint).eos_token_ids,
        )
        self.engine.start()
        self.engine.wait_until_ready(60)
        assert self.engine._loop.core is not None
        policy = self.engine._loop.core.scheduler.policy
        assert isinstance(policy, AdaptivePolicy)
        self._learn = policy.end_round
        policy.end_round = self._end_round  # type: ignore[method-assign]
        self._seconds, self._tokens, self._verifies = 0.0, 0, 0

    def _end_round(self, done: Round) -> None:
        machine = self._machine
        target_s, draft_s = machine.steps(done.target, done.draft)
        wait_s = 0.0 if done.draft is None else draft_s + machine.way_s
        total_s = target_s + wait_s + machine.host_s
        self._seconds += total_s
        self._tokens += self._recording.rounds[-1].num_tokens
        self._verifies += done.target.num_seqs
        self._learn(replace(done, total_s=total_s, target_s=target_s, draft_s=draft_s, draft_wait_s=wait_s))

    def run(self, prompts: list[LoadPrompt], temperature: float, streams: int, max_tokens: int) -> dict[str, float]:
        """Requests one after another over so many streams; rounds with a prompt in them are left out."""
        self._seconds, self._tokens, self._verifies = 0.0, 0, 0
        free = threading.Semaphore(streams)
        for seed, prompt in enumerate(prompts):
            free.acquire()
            request = GenerateRequest(
                request_id=str(seed),
                prompt_token_ids=tuple(prompt.token_ids),
                sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True),
                num_speculative_tokens=7,
            )
            self.engine.submit(request, lambda delta: free.release() if delta.finish_reason is not None else None)
        for _ in range(streams):
            free.acquire()
        return {
            "tokens_per_s": round(self._tokens / self._seconds, 1),
            "tokens_a_verify": round(self._tokens / self._verifies, 2),
        }


if __name__ == "__main__":
    main()
