"""Measure what speculation gains on a CPU: tokens a second of one stream, through the real Triton Server.

    python benchmarks/cpu_speed.py [--held-out out/nano-data] [--temperatures 0 0.6 1] [--json OUT] [--readme FILE]

Three servers run side by side: one without a draft, one that drafts what each request asks for, and one as it is by
default, which chooses. Requests go to one at a time, and the cases take turns, so that whatever else the machine does
falls on all alike. Where a step's time goes is read off the servers' own counters: the runners, the calls to them
across process borders, and the rest of the wall clock.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from kimi_backend.config.settings import ServingSettings
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_client import KimiClient
from serving_suite.server_metrics import ServerCounters, read_counters
from serving_suite.side_by_side import (
    PROMPTS,
    ServedCase,
    add_common_options,
    in_turn,
    provenance,
    servers_side_by_side,
)

BARS = {0.0: 1.5, 0.6: 1.15, 1.0: 1.0}
"""The gain that the default must have at each temperature."""
DEFAULT = "default"
METRICS_INTERVAL_S = 0.25
MARKS = ("<!-- speed: python benchmarks/cpu_speed.py -->\n", "<!-- end of speed -->\n")


@dataclass(slots=True)
class Case(ServedCase):
    """One way of serving, and where its steps' time went."""

    counters: ServerCounters = field(default_factory=ServerCounters)
    wall_s: float = 0.0
    num_tokens: int = 0

    def run(self, client: KimiClient, temperature: float, max_tokens: int) -> None:
        """All prompts, one after the other."""
        before = self._read()
        done = [client.generate(**self.request(i, temperature, max_tokens)) for i in range(len(self.prompts))]
        wall_s = sum(one.statistics["total_time_s"] for one in done)
        num_tokens = sum(one.num_output_tokens for one in done)
        self.counters += self._read() - before
        self.wall_s += wall_s
        self.num_tokens += num_tokens
        self.rates.append(num_tokens / wall_s)
        self.texts = [one.text for one in done]

    def _read(self) -> ServerCounters:
        """Read the counters after the server has brought them up to date."""
        time.sleep(2 * METRICS_INTERVAL_S)
        return read_counters(self.server.ports.metrics)

    def summary(self) -> dict[str, Any]:
        steps = self.counters.num_steps
        target_ms = 1e3 * self.counters.target_s / steps
        draft_ms = 1e3 * self.counters.draft_s / steps
        step_ms = 1e3 * self.wall_s / steps
        return {
            "case": self.name,
            "tokens_per_second": round(median(self.rates), 2),
            "tokens_per_second_best": round(max(self.rates), 2),
            "tokens_per_step": round(self.num_tokens / steps, 3),
            "step_ms": round(step_ms, 3),
            "target_ms": round(target_ms, 3),
            "draft_ms": round(draft_ms, 3),
            "rest_ms": round(step_ms - target_ms - draft_ms, 3),
            "calls_ms": round(1e3 * self.counters.calls_s / steps, 3),
            "engine_ms": round(1e3 * self.counters.engine_s / steps, 3),
        }


def measure(cases: list[Case], temperature: float, repeats: int, max_tokens: int) -> dict[str, Any]:
    """Run the cases in turn, `repeats` times, after one round that counts for nothing."""
    clients = {id(case): KimiClient(f"localhost:{case.server.ports.grpc}") for case in cases}
    for case in cases:
        Case(case.name, case.server, case.k, case.prompts).run(clients[id(case)], temperature, max_tokens)
    for repeat in range(repeats):
        for case in in_turn(cases, repeat):
            case.run(clients[id(case)], temperature, max_tokens)
    for client in clients.values():
        client.close()
    plain, speculative = cases[0], cases[1:]
    rows = [case.summary() for case in cases]
    for row, case in zip(rows, cases, strict=True):
        # Neighbours in time are compared with each other: the machine's load moves both.
        row["speedup"] = round(median(a / b for a, b in zip(case.rates, plain.rates, strict=True)), 3)
    return {
        "temperature": temperature,
        "cases": rows,
        "texts_equal": all(case.texts == plain.texts for case in speculative),
        "speedup": next(row["speedup"] for row in rows if row["case"] == DEFAULT),
        "bar": BARS.get(temperature),
    }


def server_settings(args: argparse.Namespace) -> dict[str, ServingSettings]:
    """Three servers, alike but for the draft and who says how much it drafts."""
    common = ServingSettings(
        checkpoint=str(args.checkpoint),
        device="cpu",
        cpu_threads=args.cpu_threads,
        max_model_len=1024,
        metrics_interval_s=METRICS_INTERVAL_S,
    )
    return {
        "plain": common,
        "fixed": replace(common, draft=str(args.draft), speculation_policy="fixed"),
        DEFAULT: replace(common, draft=str(args.draft)),
    }


def prompts_of(args: argparse.Namespace) -> Sequence[str]:
    """The texts that every case continues: the short ones of `side_by_side`, or held-out ones of the corpus."""
    if args.held_out is None:
        return PROMPTS
    prompts = json.loads((args.held_out / "held_out.json").read_text(encoding="utf-8"))["prompts"]
    tokenizer = load_tokenizer(args.checkpoint)
    return [tokenizer.decode(prompt["token_ids"]) for prompt in prompts[: args.num_prompts]]


def table(report: dict[str, Any]) -> str:
    """Markdown."""
    head = "| temperature | | tokens/s | gain | tokens a step | step, ms | target | draft | rest | of it calls |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|---|"]
    for run in report["runs"]:
        for row in run["cases"]:
            lines.append(
                f"| {run['temperature']:g} | {row['case']} | {row['tokens_per_second']:.0f} | {row['speedup']:.2f}x |"
                f" {row['tokens_per_step']:.2f} | {row['step_ms']:.2f} | {row['target_ms']:.2f} |"
                f" {row['draft_ms']:.2f} | {row['rest_ms']:.2f} | {row['calls_ms']:.2f} |"
            )
    return "\n".join(lines)


def verdict(run: dict[str, Any]) -> str:
    """One plain sentence."""
    bar = run["bar"]
    met = "" if bar is None else f", which {'meets' if run['speedup'] >= bar else 'MISSES'} the bar of {bar:g}x"
    texts = "every text the same" if run["texts_equal"] else "TEXTS DIFFER"
    return (
        f"Temperature {run['temperature']:g}: the default is {run['speedup']:.2f}x the server without a draft{met};"
        f" {texts}."
    )


def write_readme(path: Path, text: str) -> None:
    """Replace what stands between the marks.

    Raises:
        ValueError: the file has no such section.
    """
    old = path.read_text(encoding="utf-8")
    start, end = old.find(MARKS[0]), old.find(MARKS[1])
    if not 0 <= start < end:
        raise ValueError(f"{path}: lacks the lines {MARKS[0].strip()!r} and {MARKS[1].strip()!r}")
    path.write_text(old[: start + len(MARKS[0])] + "\n" + text + "\n\n" + old[end:], encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser)
    parser.add_argument("--cpu-threads", type=int, default=1)
    parser.add_argument("--held-out", type=Path, help="what `kimi_nano prepare` wrote: continue its held-out prompts")
    parser.add_argument("--num-prompts", type=int, default=20, help="of the held-out ones")
    parser.set_defaults(temperatures=sorted(BARS), k=[3], max_tokens=64)
    parser.add_argument("--readme", type=Path, help="write the table between the marks of this file")
    args = parser.parse_args()
    prompts = prompts_of(args)
    report: dict[str, Any] = {**provenance(), "num_prompts": len(prompts), "runs": []}
    with servers_side_by_side(server_settings(args)) as servers:
        for temperature in args.temperatures:
            cases = [
                Case("no draft", servers["plain"], None, prompts),
                *(Case(f"k = {k}", servers["fixed"], k, prompts) for k in args.k),
                Case(DEFAULT, servers[DEFAULT], None, prompts),
            ]
            report["runs"].append(measure(cases, temperature, args.repeats, args.max_tokens))
    text = table(report) + "\n\n" + "\n".join(verdict(run) for run in report["runs"])
    print(text)
    if args.readme:
        write_readme(args.readme, text)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
