"""Compares proposers on kimi-nano: three loads, four proposers, two temperatures.

    python benchmarks/lookup.py [--loads completion edit records] [--num-prompts 50] [--turns 5] [--json OUT]
    PYTHONPATH=backend:kernels python benchmarks/lookup.py --in-process [...]

One real Triton Server on a CPU, with a draft and an index, has all four; with --in-process it is a pair in this
process, on a GPU where there is one. They take turns, load by load, after a few prompts of each by which kernels are
compiled. Loads are made of held-out files (`lookup_suite.loads`). Texts must be equal, whoever proposes. An edit's
prompts are told apart by whether the greedy text without speculation repeats 16 tokens of the span or more: --pool
looks at so many for that.
"""

import argparse
import json
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from kimi_backend.config.settings import ServingSettings
from kimi_backend.text.tokenizer import load_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))

from lookup_suite.cells import PROPOSERS, Reply, Send, Turns, cells_of, comparison, said
from lookup_suite.in_process import in_process
from lookup_suite.loads import LEAST_REPEATED, LoadPrompt, held_out_files, longest_repeated, make_loads
from serving_suite.side_by_side import NANO, in_turn, provenance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--loads", nargs="+", default=["completion", "edit", "records"])
    parser.add_argument("--num-prompts", type=int, default=50)
    parser.add_argument("--pool", type=int, default=50, help="edits that are looked through for those that repeat")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--warm-up", type=int, default=4, help="prompts of each proposer before a load's turns")
    parser.add_argument("--policy", choices=["adaptive", "fixed"], default="adaptive")
    parser.add_argument("--min-match", type=int, default=ServingSettings().lookup_min_match)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings = ServingSettings(
        checkpoint=str(NANO),
        draft=str(NANO / "draft"),
        device="auto" if args.in_process else "cpu",
        max_num_seqs=16,
        proposer="lookup+eagle3",
        lookup_min_match=args.min_match,
        speculation_policy=args.policy,
    )
    loads = make_loads(held_out_files(), load_tokenizer(str(NANO)).encode, max(args.pool, args.num_prompts))
    report: dict[str, Any] = {**about(args), "cells": [], "comparisons": []}
    with serving(settings, args.in_process) as send:
        bench = Bench(send, args)
        for name in args.loads:
            prompts = loads[name][: args.pool if name == "edit" else args.num_prompts]
            if name == "edit":
                report["edits"], prompts = bench.edits(prompts)
                print(json.dumps(report["edits"]), flush=True)
                prompts = prompts[: args.num_prompts]
            for temperature in args.temperatures if prompts else ():
                cells, compared = bench.measure(name, prompts, temperature)
                report["cells"] += cells
                report["comparisons"].append(compared)
                print(*(json.dumps(entry) for entry in (*cells, compared)), sep="\n", flush=True)
                if args.json:  # a run that is cut off keeps what it has
                    args.json.write_text(json.dumps(report, indent=1))
    print(said(report["comparisons"]))


def about(args: argparse.Namespace) -> dict[str, Any]:
    """Collect what a report must say of its making."""
    is_on_gpu = args.in_process and torch.cuda.is_available()
    device = torch.cuda.get_device_name() if is_on_gpu else "cpu"
    return {**provenance(), "device": device, "date": time.strftime("%Y-%m-%d %H:%M")}


def serving(settings: ServingSettings, is_in_process: bool) -> AbstractContextManager[Send]:
    """A way to send requests, while it is open."""
    if is_in_process:
        return in_process(settings)
    from lookup_suite.served import served  # where nothing is served, no client need be installed

    return served(settings)


class Bench:
    """Sends loads."""

    def __init__(self, send: Send, args: argparse.Namespace) -> None:
        self._send, self._args = send, args

    def send(self, prompts: list[LoadPrompt], proposer: str, temperature: float) -> tuple[list[Reply], float]:
        """The replies in the prompts' order, and output tokens a second. Nothing is found in the prefix cache."""
        requests = [
            {
                "input_ids": prompt.token_ids,
                "seed": number,
                "max_tokens": self._args.max_tokens,
                "temperature": temperature,
                "ignore_eos": True,
                "proposer": proposer,
                "cache_salt": f"{proposer} {time.time_ns()}",
            }
            for number, prompt in enumerate(prompts)
        ]
        return self._send(requests, self._args.streams)

    def edits(self, prompts: list[LoadPrompt]) -> tuple[dict[str, int], list[LoadPrompt]]:
        """The number of the pool's texts that repeat, and those."""
        replies, _ = self.send(prompts, "none", 0.0)
        repeating = [
            prompt
            for prompt, reply in zip(prompts, replies, strict=True)
            if longest_repeated(prompt.span, list(reply.token_ids)) >= LEAST_REPEATED
        ]
        return {"pool": len(prompts), "repeat": len(repeating)}, repeating

    def measure(
        self, name: str, prompts: list[LoadPrompt], temperature: float
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """One cell a proposer, and both together against either alone. The policy learns in the first turn too."""
        for proposer in PROPOSERS:
            self.send(prompts[: self._args.warm_up], proposer, temperature)
        by_proposer = [Turns(proposer) for proposer in PROPOSERS]
        for turn in range(self._args.turns):
            for turns in in_turn(by_proposer, turn):
                replies, rate = self.send(prompts, turns.name, temperature)
                turns.replies.append(replies)
                turns.rates.append(rate)
        load, cells = {"load": name, "temperature": temperature}, cells_of(by_proposer)
        return [load | cell for cell in cells], load | comparison(by_proposer, cells)


if __name__ == "__main__":
    main()
