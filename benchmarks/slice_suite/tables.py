"""Markdown tables and one picture out of the JSON of several runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slice_suite.report import NUM_MODEL_LAYERS, Case, peer_ms, per_layer

NO_CEILINGS: dict[str, float] = {}


def load_cases(paths: Sequence[Path]) -> list[Case]:
    """The cases of all files, each with its run's device, read bandwidth and settings; of a file of several runs, all.

    The first one of a shape and draft counts.
    """
    found: dict[tuple[Any, ...], Case] = {}
    for path in paths:
        document = json.loads(path.read_text())
        for run in document.get("runs", [document]):
            about = {"device": run["device"], "settings": run.get("settings", {})}
            about |= {
                name: value for name, value in (run["ceilings"] or NO_CEILINGS).items() if name == "read_bytes_per_us"
            }
            for case in run["cases"]:
                shape = (case[name] for name in ("num_layers", "num_speculative_tokens", "prompt_len", "batch_size"))
                draft = draft_of(about["settings"])
                found.setdefault(
                    (draft, *shape), case | about | {"draft": draft if case["num_speculative_tokens"] else ""}
                )
    return [found[key] for key in sorted(found)]


def draft_of(settings: dict[str, Any]) -> str:
    """The draft in words: `bf16` as it is."""
    layer = settings.get("draft_quantization", "bf16")
    head = settings.get("draft_head_quantization", layer)
    vocab = f", {settings['draft_vocab']:,} tokens" if "draft_vocab" in settings else ""
    return (layer if layer == head else f"{layer}, its head {head}") + vocab


def rounds_table(cases: Sequence[Case]) -> str:
    lines = [
        "| draft | layers | k | batch x prompt | round ms | in lockstep | = target | + draft | + host | floor"
        " | of floor | tok/s | vLLM |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in cases:
        if "round_ms" not in case:
            continue
        lines.append(
            f"| {case['draft'] or '-'} | {case['num_layers']} | {case['num_speculative_tokens']}"
            f" | {_shape(case)} | {case['round_ms']:.2f}"
            f" | {case.get('lockstep_round_ms', case['round_ms']):.2f}"
            f" | {case['target_ms']:.2f} | {case['draft_ms']:.2f} | {case['host_ms']:.2f}"
            f" | {case.get('floor_ms', 0):.2f} | {case.get('of_floor') or 0:.2f} | {case['decode_tokens_per_s']:,.0f}"
            f" | {peer_ms(case) or '-'} |"
        )
    return "\n".join(lines)


def layers_table(cases: list[Case]) -> str:
    """A row for each number of layers, with the draft as it is."""
    whole = f"extrapolated_{NUM_MODEL_LAYERS}_layers_ms"
    lines = [
        "| k | batch x prompt | an expert layer, ms | floor | of floor | the rest, ms | floor"
        f" | {NUM_MODEL_LAYERS} layers, extrapolated, ms | of floor | kernels a layer |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for entry in per_layer([case for case in cases if case["draft"] in ("", "bf16")]):
        layer, fixed, model = (entry.get(f"{part}_floor_ms", 0.0) for part in ("expert_layer", "fixed", "extrapolated"))
        lines.append(
            f"| {entry['num_speculative_tokens']} | {_shape(entry)} | {entry['expert_layer_ms']:.3f} | {layer:.3f}"
            f" | {_ratio(entry['expert_layer_ms'], layer)} | {entry['fixed_ms']:.2f} | {fixed:.2f}"
            f" | {entry[whole]:.1f} | {_ratio(entry[whole], model)} | {entry.get('kernels_a_layer', '-')} |"
        )
    return "\n".join(lines)


def _ratio(value: float, floor: float) -> str:
    return f"{value / floor:.2f}" if floor else "-"


def gpu_table(cases: Sequence[Case]) -> str:
    """Microseconds of a round on the GPU by kind of kernel."""
    profiled = [case for case in cases if "gpu" in case]
    totals: dict[str, float] = {}
    for case in profiled:
        for kind, spent in case["gpu"]["by_kind"].items():
            totals[kind] = totals.get(kind, 0.0) + spent
    kinds = sorted(totals, key=lambda kind: -totals[kind])
    lines = [
        "| draft | layers | k | batch x prompt | covered | busy | kernels | " + " | ".join(kinds) + " |",
        "| --- | --- | --- | --- | --- | --- | --- |" + " --- |" * len(kinds),
    ]
    lines += [
        f"| {case['draft'] or '-'} | {case['num_layers']} | {case['num_speculative_tokens']} | {_shape(case)}"
        f" | {case['gpu']['covered_us']:,.0f} | {case['gpu']['busy_us']:,.0f} | {case['gpu']['num_kernels']:.0f} | "
        + " | ".join(f"{case['gpu']['by_kind'].get(kind, 0):,.0f}" for kind in kinds)
        + " |"
        for case in profiled
    ]
    return "\n".join(lines)


def _shape(case: Case) -> str:
    return f"{case['batch_size']} x {case['prompt_len'] / 1024:g}k"
