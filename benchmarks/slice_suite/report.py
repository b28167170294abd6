"""Conclusions from the measured cases: time a layer, fixed cost, a guess for the whole model; table and picture."""

from pathlib import Path
from typing import Any

NUM_MODEL_LAYERS = 61

Case = dict[str, Any]

PEER = {
    (5, 1, 1, 0): 2.33,
    (5, 4, 1, 0): 3.13,
    (5, 4, 8, 0): 3.21,
    (5, 16, 1, 0): 5.81,
    (5, 16, 8, 0): 6.02,
    (5, 64, 1, 0): 12.13,
    (5, 1, 1, 3): 7.25,
    (5, 4, 1, 3): 9.95,
    (5, 4, 8, 3): 10.1,
    (5, 16, 1, 3): 16.2,
    (5, 16, 8, 3): 16.9,
    (5, 64, 1, 3): 22.5,
    (3, 1, 1, 0): 1.81,
    (3, 16, 1, 0): 3.58,
    (3, 16, 8, 0): 3.72,
    (3, 64, 1, 0): 6.77,
    (3, 1, 1, 3): 6.21,
    (3, 16, 1, 3): 10.9,
    (3, 16, 8, 3): 11.5,
    (3, 64, 1, 3): 14.5,
}
"""vLLM 0.22.0 on the same kind of card and slice: ms a round by (layers, batch, prompt in thousands, k)."""


def peer_ms(case: Case) -> float | None:
    """The peer's round at the full width and the full draft."""
    key = (case["num_layers"], case["batch_size"], round(case["prompt_len"] / 1024), case["num_speculative_tokens"])
    return PEER.get(key) if case["preset"] == "kimi-k2.5" else None


def per_layer(cases: list[Case]) -> list[dict[str, Any]]:
    """One expert layer's time, everything else, and the whole model, extrapolated from two depths."""
    found = []
    by_shape: dict[tuple[int, int, int], dict[int, Case]] = {}
    for case in cases:
        if "round_ms" in case and "num_masked" not in case and "matches" not in case:
            shape = (case["batch_size"], case["prompt_len"], case["num_speculative_tokens"])
            by_shape.setdefault(shape, {})[case["num_layers"]] = case
    for (batch_size, prompt_len, k), depths in by_shape.items():
        if len(depths) < 2:
            continue
        entry = {"batch_size": batch_size, "prompt_len": prompt_len, "num_speculative_tokens": k}
        a_layer, fixed, whole = _split({layers: case["round_ms"] for layers, case in depths.items()})
        entry |= {"expert_layer_ms": a_layer, "fixed_ms": fixed, f"extrapolated_{NUM_MODEL_LAYERS}_layers_ms": whole}
        if all("floor_ms" in case for case in depths.values()):
            # Bytes first: the depths may be of two runs, whose bandwidths differ a little.
            rates = {layers: case.get("read_bytes_per_us", 1.0) / _rate_of(depths) for layers, case in depths.items()}
            floors = _split({layers: rates[layers] * case["floor_ms"] for layers, case in depths.items()})
            entry |= dict(
                zip(("expert_layer_floor_ms", "fixed_floor_ms", "extrapolated_floor_ms"), floors, strict=True)
            )
        if all("gpu" in case for case in depths.values()):
            entry["kernels_a_layer"] = _split({n: case["gpu"]["num_kernels"] for n, case in depths.items()})[0]
        found.append(entry)
    return found


MOST_BESIDE_ONE_MASKED = 1.1
"""The most that a round may take when one of its sequences is masked, of what it takes without: the others wait too."""
MOST_WITH_MATCHES = 1.02
"""The most that a round may take whose proposals are looked up, of the draft's with as many rows."""


def beside_verdicts(cases: list[Case]) -> list[str]:
    """A line for each round with masked sequences, or with looked-up proposals: its time as a share of the same batch's
    without any."""
    names = ("num_layers", "batch_size", "prompt_len", "num_speculative_tokens")
    measured = [case for case in cases if "round_ms" in case]
    plain = {
        tuple(case[name] for name in names): case["round_ms"]
        for case in measured
        if "num_masked" not in case and "matches" not in case
    }
    lines = []
    for case in measured:
        shape = tuple(case[name] for name in names)
        if ("num_masked" not in case and "matches" not in case) or shape not in plain:
            continue
        share, most = case["round_ms"] / plain[shape], None
        if "matches" in case:
            about, most = f"batch of {case['batch_size']}, matches {case['matches']}", MOST_WITH_MATCHES
        else:
            about = f"{case['num_masked']} of {case['batch_size']} masked by {case['masked_by']}"
            most = MOST_BESIDE_ONE_MASKED if case["num_masked"] == 1 else None
        judged = "" if most is None else f", at most {most} wanted: " + ("kept" if share <= most else "missed")
        lines.append(f"{about}, k = {shape[-1]}: {share:.3f} of the round without{judged}")
    return lines


def _rate_of(depths: dict[int, Case]) -> float:
    """Read bandwidth of the deepest slice's run; 1 where it is not told."""
    return float(depths[max(depths)].get("read_bytes_per_us", 1.0))


def _split(ms: dict[int, float]) -> tuple[float, float, float]:
    """Split times by number of layers -> (an expert layer, everything else, NUM_MODEL_LAYERS of them)."""
    low, high = min(ms), max(ms)
    a_layer = (ms[high] - ms[low]) / (high - low)
    fixed = ms[low] - (low - 1) * a_layer
    return round(a_layer, 4), round(fixed, 3), round(fixed + (NUM_MODEL_LAYERS - 1) * a_layer, 2)


def row(case: Case) -> str:
    """One line of the table."""
    peer = peer_ms(case)
    cells = [
        f"{case['num_layers']:2d} layers k={case['num_speculative_tokens']}"
        f" {case['batch_size']:3d} x {case['prompt_len']:5d}:",
    ]
    if "num_masked" in case:
        cells[0] = f"{cells[0][:-1]}, {case['num_masked']} masked by {case['masked_by']}:"
    if "matches" in case:
        cells[0] = f"{cells[0][:-1]}, matches {case['matches']}:"
    if case.get("error"):
        return cells[0] + " FAILED " + case["error"]
    if "replayed_target_ms" in case and "round_ms" in case:
        cells.append(
            f"round {case['round_ms']:7.3f} ms (p90 {case['round_p90_ms']:.2f});"
            f" in lockstep {case.get('lockstep_round_ms', case['round_ms']):.3f} = target {case['target_ms']:.3f}"
            f" + draft {case['draft_ms']:.3f} + host {case['host_ms']:.3f};"
            f" replayed {case['replayed_target_ms']:.3f} + {case['replayed_draft_ms']:.3f};"
            f" {case['tokens_a_round']:.2f} tokens a round, {case['decode_tokens_per_s']:.0f} tok/s"
        )
    elif "round_ms" in case:
        cells.append(f"round {case['round_ms']:7.3f} ms (p90 {case['round_p90_ms']:.2f});")
        cells.append(f"in lockstep {case.get('lockstep_round_ms', case['round_ms']):.3f};")
        cells.append(f"{case['tokens_a_round']:.2f} tokens a round")
    if "floor_ms" in case:
        cells.append(f"floor {case['floor_ms']:.2f} ({case['of_floor']}x)")
    if "gpu" in case:
        gpu = case["gpu"]
        busy = f"gpu busy {gpu['busy_us'] / 1e3:.3f} (covered {gpu['covered_us'] / 1e3:.3f})"
        cells.append(f"{busy} in {gpu['num_kernels']:.0f} kernels")
    if "gpu_in_engine" in case:
        cells.append(f"(in the engine {case['gpu_in_engine']['covered_us'] / 1e3:.3f})")
    if peer is not None:
        cells.append(f"vLLM {peer}")
    cells.append(f"prefill {case.get('prefill_ms')} ms")
    return " ".join(cells)


def plot(cases: list[Case], path: Path, title: str) -> None:
    """Rounds of the deepest slice: target, draft and host in lockstep as bars; overlapped, floor, peer as marks."""
    from matplotlib.figure import Figure

    deepest = max(case["num_layers"] for case in cases)
    shown = [case for case in cases if case["num_layers"] == deepest and "round_ms" in case]
    figure = Figure(figsize=(9, 1.4 + 0.42 * len(shown)), layout="constrained")
    axes = figure.subplots()
    places = range(len(shown))
    left = [0.0] * len(shown)
    for part, color in (("target_ms", "#2f8f83"), ("draft_ms", "#7a5195"), ("host_ms", "#b0b0b0")):
        widths = [case[part] for case in shown]
        axes.barh(places, widths, left=left, color=color, label=f"{part.removesuffix('_ms')}, in lockstep")
        left = [a + b for a, b in zip(left, widths, strict=True)]
    floors = [case.get("floor_ms") for case in shown]
    axes.scatter([f or 0 for f in floors], places, marker="|", s=260, color="black", label="floor", zorder=3)
    axes.scatter(
        [case["round_ms"] for case in shown], places, s=36, color="black", label="round, overlapped",
        zorder=4,
    )  # fmt: skip
    with_its_draft = [case.get("draft", "bf16") in ("", "bf16") for case in shown]
    peers = [(peer_ms(case), place) for place, case in zip(places, shown, strict=True) if with_its_draft[place]]
    axes.scatter(
        [peer for peer, _ in peers if peer], [place for peer, place in peers if peer], marker="D", s=28,
        color="#d1495b", label="vLLM 0.22.0 on an H100", zorder=3,
    )  # fmt: skip
    axes.set_yticks(
        list(places),
        [
            f"{c.get('draft', '')}  k={c['num_speculative_tokens']}  {c['batch_size']} x {c['prompt_len'] / 1024:g}k"
            for c in shown
        ],
    )
    axes.invert_yaxis()
    axes.set(xlabel="ms a round", title=title.replace("; ", "\n"))
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=110)
