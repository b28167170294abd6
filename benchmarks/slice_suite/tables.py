"""Markdown tables and one picture out of the JSON of several runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slice_suite.report import NUM_MODEL_LAYERS, Case, peer_ms, per_layer


def load_cases(paths: Sequence[Path]) -> list[Case]:
    """The cases of all files; the first one of a shape counts."""
    found: dict[tuple[Any, ...], Case] = {}
    for path in paths:
        for case in json.loads(path.read_text())["cases"]:
            key = tuple(case[name] for name in ("num_layers", "num_speculative_tokens", "prompt_len", "batch_size"))
            found.setdefault(key, case)
    return [found[key] for key in sorted(found)]


def rounds_table(cases: Sequence[Case]) -> str:
    lines = [
        "| layers | k | batch x prompt | round ms | in lockstep | = target | + draft | + host | floor | of floor |"
        " tok/s | vLLM |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in cases:
        if "round_ms" not in case:
            continue
        lines.append(
            f"| {case['num_layers']} | {case['num_speculative_tokens']} | {_shape(case)} | {case['round_ms']:.2f}"
            f" | {case.get('lockstep_round_ms', case['round_ms']):.2f}"
            f" | {case['target_ms']:.2f} | {case['draft_ms']:.2f} | {case['host_ms']:.2f}"
            f" | {case.get('floor_ms', 0):.2f} | {case.get('of_floor') or 0:.2f} | {case['decode_tokens_per_s']:,.0f}"
            f" | {peer_ms(case) or '-'} |"
        )
    return "\n".join(lines)


WANTED = {
    (0, 1): (2.6, 2.1),
    (0, 4): (3.6, 2.9),
    (0, 16): (6.9, 5.5),
    (0, 64): (14.5, 11.4),
    (3, 1): (7.2, 6.0),
    (3, 4): (10.2, 8.5),
    (3, 16): (17.8, 14.5),
    (3, 64): (25.0, 20.0),
}
"""What a round of 5 layers and a prompt of 1k may take and should take on an H100, ms, by (k, batch)."""
WANTED_OF_A_CHEAP_DRAFT = {(3, 1): (5.4, 4.4), (3, 4): (8.4, 7.0), (3, 16): (16.0, 13.0), (3, 64): (23.5, 19.0)}
"""The same with a reduced or quantised draft."""


def judged_table(cases: Sequence[Case], device: str, is_cheap_draft: bool) -> str:
    """The rounds that something was asked of, beside it; no verdict about another card than an H100."""
    wanted = WANTED_OF_A_CHEAP_DRAFT if is_cheap_draft else WANTED
    lines = [
        "| k | batch | floor | round ms | in lockstep | of floor | must / aim | vLLM |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in cases:
        shape = (case["num_speculative_tokens"], case["batch_size"])
        if "round_ms" not in case or (case["num_layers"], case["prompt_len"]) != (5, 1024) or shape not in wanted:
            continue
        must, aim = wanted[shape]
        reached = (
            "kept, aim reached" if case["round_ms"] <= aim else "kept" if case["round_ms"] <= must else "**missed**"
        )
        verdict = f": {reached}" if "H100" in device else ""
        lines.append(
            f"| {shape[0]} | {shape[1]} | {case.get('floor_ms', 0):.2f} | {case['round_ms']:.2f}"
            f" | {case.get('lockstep_round_ms', case['round_ms']):.2f} | {case.get('of_floor') or 0:.2f}"
            f" | {must:g} / {aim:g}{verdict} | {'-' if is_cheap_draft else peer_ms(case) or '-'} |"
        )
    return "\n".join(lines)


def layers_table(cases: list[Case]) -> str:
    whole = f"extrapolated_{NUM_MODEL_LAYERS}_layers_ms"
    lines = [
        f"| k | batch x prompt | an expert layer, ms | the rest, ms | {NUM_MODEL_LAYERS} layers, extrapolated, ms |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {entry['num_speculative_tokens']} | {_shape(entry)} | {entry['expert_layer_ms']:.3f}"
        f" | {entry['fixed_ms']:.2f} | {entry[whole]:.1f} |"
        for entry in per_layer(cases)
    ]
    return "\n".join(lines)


def gpu_table(cases: Sequence[Case]) -> str:
    """Microseconds of a round on the GPU by kind of kernel."""
    profiled = [case for case in cases if "gpu" in case]
    totals: dict[str, float] = {}
    for case in profiled:
        for kind, spent in case["gpu"]["by_kind"].items():
            totals[kind] = totals.get(kind, 0.0) + spent
    kinds = sorted(totals, key=lambda kind: -totals[kind])
    lines = [
        "| k | batch x prompt | busy | kernels | " + " | ".join(kinds) + " |",
        "| --- | --- | --- | --- |" + " --- |" * len(kinds),
    ]
    lines += [
        f"| {case['num_speculative_tokens']} | {_shape(case)} | {case['gpu']['busy_us']:,.0f}"
        f" | {case['gpu']['num_kernels']:.0f} | "
        + " | ".join(f"{case['gpu']['by_kind'].get(kind, 0):,.0f}" for kind in kinds)
        + " |"
        for case in profiled
    ]
    return "\n".join(lines)


def _shape(case: Case) -> str:
    return f"{case['batch_size']} x {case['prompt_len'] / 1024:g}k"
