"""Compares proposers by the rounds that they take, timed by a table: kimi-nano's texts, replayed.

    PYTHONPATH=benchmarks:demo python benchmarks/lookup_by_table.py [--loads completion edit records] [--texts FILE]

What `lookup.py` measures through a server, without what else a machine does. The pair writes each text once, and its
draft proposes at every place (`lookup_suite.recorded`; --texts keeps that); an engine then serves the texts again over
runners that know them (`lookup_suite.replayed`). Matches, proposals and choices are real; rounds take what the table
says, and the policy is told so. A draft that comes back in mid text proposes what it would have had it stayed.

Each load is an engine's first one, then each order of the loads is one engine's. `bound` is what no choice could exceed
(`lookup_suite.bound`). Edits are told apart by whether the text repeats 16 tokens of the span or more.
"""

import argparse
import itertools
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kimi_backend.config.settings import ServingSettings
from kimi_backend.engine.engine import Engine
from kimi_backend.serving.spec_ensemble_server import scheduler_settings
from kimi_backend.spec_decode.round_times import Round
from kimi_backend.text.tokenizer import load_tokenizer
from lookup_suite.bound import bound
from lookup_suite.cells import PROPOSERS
from lookup_suite.loads import LEAST_REPEATED, held_out_files, longest_repeated, make_loads
from lookup_suite.recorded import RecordedText, load, record, run_all, save
from lookup_suite.replayed import ReplayedDraft, ReplayedTarget
from replayed_policy import COSTS, Machine
from serving_suite.side_by_side import NANO, provenance
from slice_suite.recording import RecordedTarget, Recording

Texts = dict[str, list[RecordedText]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", default=["completion", "edit", "records"])
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--min-match", type=int, default=ServingSettings().lookup_min_match)
    parser.add_argument("--costs", type=Path, default=COSTS)
    parser.add_argument("--texts", type=Path, help="texts of an earlier run, or where to keep these")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    texts, machine = recorded(args), Machine.read(args.costs)
    report: dict[str, Any] = {**provenance(), "date": time.strftime("%Y-%m-%d %H:%M"), "cells": [], "orders": []}
    for temperature in args.temperatures:
        cells = {name: texts[f"{name} {temperature:g}"] for name in args.loads}
        cells |= {f"{name} that repeats": repeating(of_cell) for name, of_cell in cells.items() if name == "edit"}
        for name, of_cell in cells.items():
            if not of_cell:
                continue
            cell = {"load": name, "temperature": temperature, "num_prompts": len(of_cell)}
            cell |= {proposer: serve(proposer, [of_cell], machine, args)[0] for proposer in PROPOSERS}
            cell["bound"] = bounds(of_cell, machine, args)
            report["cells"].append({**cell, "of_the_better": of_the_better(cell)})
            print(json.dumps(report["cells"][-1]), flush=True)
        for order in itertools.permutations(args.loads):
            done = {p: serve(p, [cells[name] for name in order], machine, args) for p in PROPOSERS[1:]}
            found = [of_the_better({p: rates[place] for p, rates in done.items()}) for place in range(len(order))]
            entry = {"temperature": temperature, "of_the_better": dict(zip(order, found, strict=True))}
            report["orders"].append(entry)
            print(json.dumps(entry), flush=True)
    if args.json:
        lines = (f" {json.dumps(name)}: {_lines(value)}" for name, value in report.items())
        args.json.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def recorded(args: argparse.Namespace) -> Texts:
    """The texts by load and temperature, of an earlier run or of the pair in this process."""
    if args.texts is not None and args.texts.exists():
        return load(args.texts)
    loads = make_loads(held_out_files(), load_tokenizer(str(NANO)).encode, args.num_prompts)
    settings = ServingSettings(checkpoint=str(NANO), draft=str(NANO / "draft"), device="cpu", max_num_seqs=32)
    texts: Texts = {}
    for name, temperature in itertools.product(args.loads, args.temperatures):
        texts[f"{name} {temperature:g}"] = [RecordedText(p.token_ids, p.span, temperature) for p in loads[name]]
        record(settings, texts[f"{name} {temperature:g}"], args.max_tokens)
    if args.texts is not None:
        save(args.texts, texts)
    return texts


def repeating(texts: Sequence[RecordedText]) -> list[RecordedText]:
    """Those that repeat enough of their span."""
    return [text for text in texts if longest_repeated(text.span, text.tokens) >= LEAST_REPEATED]


def serve(
    proposer: str, loads: Sequence[Sequence[RecordedText]], machine: Machine, args: argparse.Namespace
) -> list[dict[str, float]]:
    """Serve loads one after the other on one engine."""
    clocked = ClockedEngine(proposer, machine, args)
    found = [clocked.run(texts, args.max_tokens) for texts in loads]
    clocked.engine.stop()
    return found


def of_the_better(cell: dict[str, Any]) -> float:
    """Tokens a second with both, by those of the faster of the two."""
    rates = {proposer: cell[proposer]["tokens_per_s"] for proposer in PROPOSERS[1:]}
    return round(float(rates["lookup+eagle3"] / max(rates["eagle3"], rates["lookup"])), 3)


def bounds(texts: Sequence[RecordedText], machine: Machine, args: argparse.Namespace) -> dict[str, float]:
    """The bounds of each proposer."""
    uses = {"eagle3": (True, False), "lookup": (False, True), "lookup+eagle3": (True, True)}
    return {
        proposer: round(
            bound(texts, machine, args.streams, drafts=drafts, looks_up=looks_up, min_match=args.min_match), 1
        )
        for proposer, (drafts, looks_up) in uses.items()
    }


def _lines(value: Any) -> str:
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n  " + ",\n  ".join(json.dumps(item) for item in value) + "\n ]"


class ClockedEngine:
    """An engine over recorded texts, whose rounds take what a table says."""

    def __init__(self, proposer: str, machine: Machine, args: argparse.Namespace) -> None:
        settings = ServingSettings(
            checkpoint=str(NANO),
            draft=str(NANO / "draft"),
            max_num_seqs=args.streams,
            proposer=proposer,
            lookup_min_match=args.min_match,
        )
        self._machine = machine
        self._texts: list[RecordedText] = []
        self._target, self._recording = ReplayedTarget(self._texts, machine.target), Recording()
        uses_draft = settings.chosen_proposer.uses_draft
        self.engine = Engine(
            RecordedTarget(self._target, self._recording),
            ReplayedDraft(self._texts, machine.draft) if uses_draft else None,
            settings=replace(scheduler_settings(settings), enable_prefix_cache=False),
            eos_token_ids=(),
        )
        self.engine.start()
        self.engine.wait_until_ready(60)
        assert self.engine._loop.core is not None
        self._rested, rest = threading.Event(), self.engine._loop.core.times.rest

        def note_rest() -> None:
            rest()
            self._rested.set()

        self.engine._loop.core.times.rest = note_rest  # type: ignore[method-assign]
        policy = self.engine._loop.core.scheduler.policy
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

    def run(self, texts: Sequence[RecordedText], max_tokens: int) -> dict[str, float]:
        """Requests one after another over the streams; rounds with a prompt in them are left out."""
        self._seconds, self._tokens, self._verifies = 0.0, 0, 0
        self._texts[:] = texts
        target = self._target
        target.num_checks = target.num_kept = 0
        assert run_all(self.engine, texts, max_tokens) == [text.tokens for text in texts]
        self._rested.clear()
        assert self._rested.wait(60), "the last round is told of when there is nothing to do"
        return {
            "tokens_per_s": round(self._tokens / self._seconds, 1),
            "tokens_a_verify": round(self._tokens / self._verifies, 2),
            "acceptance_length": round(1 + target.num_kept / max(target.num_checks, 1), 2),
        }


if __name__ == "__main__":
    main()
