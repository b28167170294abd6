"""Compares proposers: kimi-nano through the real Triton Server: three loads, four proposers, two temperatures.

    python benchmarks/lookup.py [--loads completion edit records] [--num-prompts 50] [--json OUT]

One server with a draft and an index has all four; they take turns, load by load. Loads are made of held-out files
(`lookup_suite.loads`). Texts must be equal, whoever proposes. An edit's prompts are told apart by whether the greedy
text without speculation repeats 16 tokens of the span or more: --pool looks at so many for that.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from kimi_backend.config.settings import ServingSettings
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_client import Completion
from kimi_client.load import acceptance_by_proposer, pooled_acceptance, run_load

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))

from lookup_suite.loads import LoadPrompt, held_out_files, make_loads
from serving_suite.side_by_side import NANO, in_turn, provenance, servers_side_by_side

PROPOSERS = ("none", "eagle3", "lookup", "lookup+eagle3")
LEAST_REPEATED = 16
"""Tokens of the span that a text must repeat to be an edit."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", default=["completion", "edit", "records"])
    parser.add_argument("--num-prompts", type=int, default=50)
    parser.add_argument("--pool", type=int, default=50, help="edits that are looked through for those that repeat")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--policy", choices=["adaptive", "fixed"], default="adaptive")
    parser.add_argument("--min-match", type=int, default=ServingSettings().lookup_min_match)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings = ServingSettings(
        checkpoint=str(NANO),
        draft=str(NANO / "draft"),
        device="cpu",
        max_num_seqs=16,
        proposer="lookup+eagle3",
        lookup_min_match=args.min_match,
        speculation_policy=args.policy,
    )
    loads = make_loads(held_out_files(), load_tokenizer(str(NANO)).encode, max(args.pool, args.num_prompts))
    report: dict[str, Any] = {**provenance(), "date": time.strftime("%Y-%m-%d %H:%M"), "cells": []}
    with servers_side_by_side({"all": settings}) as servers:
        bench = Bench(f"localhost:{servers['all'].ports.grpc}", args)
        for name in args.loads:
            prompts = loads[name][: args.pool if name == "edit" else args.num_prompts]
            if name == "edit":
                report["edits"], prompts = bench.edits(prompts)
                print(json.dumps(report["edits"]), flush=True)
                prompts = prompts[: args.num_prompts]
            for temperature in args.temperatures:
                for cell in bench.measure(name, prompts, temperature) if prompts else ():
                    report["cells"].append(cell)
                    print(json.dumps(cell), flush=True)
                if args.json:  # a run that is cut off keeps what it has
                    args.json.write_text(json.dumps(report, indent=1))


class Bench:
    """Sends loads to one server."""

    def __init__(self, url: str, args: argparse.Namespace) -> None:
        self._url, self._args = url, args

    def send(self, prompts: list[LoadPrompt], proposer: str, temperature: float) -> tuple[list[Completion], float]:
        """The completions in the prompts' order, and output tokens a second. Nothing is found in the prefix cache."""
        requests = [
            {
                "input_ids": prompt.token_ids,
                "seed": number,
                "max_tokens": self._args.max_tokens,
                "temperature": temperature,
                "ignore_eos": True,
                "proposer": proposer,
                "return_token_ids": True,
                "cache_salt": f"{proposer} {time.time_ns()}",
            }
            for number, prompt in enumerate(prompts)
        ]
        result = asyncio.run(run_load(self._url, requests, self._args.streams))
        if result.errors:
            raise SystemExit(result.errors[0])
        done = sorted((r.completion for r in result.requests), key=lambda completion: completion.statistics["seed"])
        return done, result.output_tokens_per_second

    def edits(self, prompts: list[LoadPrompt]) -> tuple[dict[str, int], list[LoadPrompt]]:
        """The number of the pool's texts that repeat, and those."""
        completions, _ = self.send(prompts, "none", 0.0)
        repeating = [
            prompt
            for prompt, completion in zip(prompts, completions, strict=True)
            if longest_repeated(prompt.span, list(completion.token_ids)) >= LEAST_REPEATED
        ]
        return {"pool": len(prompts), "repeat": len(repeating)}, repeating

    def measure(self, name: str, prompts: list[LoadPrompt], temperature: float) -> list[dict[str, Any]]:
        """One cell a proposer. The first turn warms up and learns; it counts where it is the only one."""
        rates: dict[str, list[float]] = {proposer: [] for proposer in PROPOSERS}
        last: dict[str, list[Completion]] = {}
        for turn in range(self._args.turns):
            for proposer in in_turn(list(PROPOSERS), turn):
                last[proposer], rate = self.send(prompts, proposer, temperature)
                rates[proposer].append(rate)
        texts = {proposer: [c.text for c in completions] for proposer, completions in last.items()}
        return [
            {
                "load": name,
                "temperature": temperature,
                "proposer": proposer,
                "num_prompts": len(prompts),
                "tokens_per_s": round(sorted(rates[proposer])[len(rates[proposer]) // 2], 1),
                "tokens_a_verify": round(tokens_a_verify(last[proposer]), 3),
                "rounds": pooled_acceptance([c.speculation for c in last[proposer]]),
                "by_proposer": acceptance_by_proposer(last[proposer]),
                "texts_equal": texts[proposer] == texts["none"],
            }
            for proposer in PROPOSERS
        ]


def tokens_a_verify(completions: list[Completion]) -> float:
    """The mean over all verifies, those without draft tokens too."""
    verifies = sum(sum(c.statistics["num_draft_tokens_histogram"]) for c in completions)
    return sum(c.num_output_tokens - 1 for c in completions) / max(verifies, 1)


def longest_repeated(span: list[int], tokens: list[int]) -> int:
    """Tokens of the longest run of `tokens` that stands in `span`."""
    best, lengths = 0, [0] * (len(span) + 1)
    for token in tokens:
        before = 0
        for place, other in enumerate(span, 1):
            before, lengths[place] = lengths[place], before + 1 if other == token else 0
            best = max(best, lengths[place])
    return best


if __name__ == "__main__":
    main()
