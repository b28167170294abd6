"""Rounds beside what was asked of them on an H100, and an estimate for that card from rounds on another one."""

from collections.abc import Sequence
from typing import Any

from slice_suite.report import Case, peer_ms

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
"""The milliseconds that a round of 5 layers and a prompt of 1k may and should take on an H100, by (k, batch)."""
WANTED_OF_A_CHEAP_DRAFT = {(3, 1): (5.4, 4.4), (3, 4): (8.4, 7.0), (3, 16): (16.0, 13.0), (3, 64): (23.5, 19.0)}
"""The same with a reduced or quantised draft."""
CHEAP_DRAFT_SETTINGS = ("draft_vocab", "draft_quantization", "draft_head_quantization")
H100_READ_BYTES_PER_US = 3.12e6
H100_EXPERTS_MS = {256: 3.173}
"""A layer's routed experts by rows, as measured there (docs/benchmarks_kernels.md), where arithmetic binds them."""


def is_cheap_draft(settings: dict[str, Any]) -> bool:
    """settings: those that differ from the defaults."""
    return any(name in settings for name in CHEAP_DRAFT_SETTINGS)


def on_an_h100(case: Case) -> tuple[float, float]:
    """Estimated ms of a round: (what is beyond the floor stays as it is, all of it is bound by memory).

    With so many rows that arithmetic binds the experts, they take what they took there.
    """
    slower = case["read_bytes_per_us"] / H100_READ_BYTES_PER_US
    round_ms, floor_ms = case["round_ms"], case["floor_ms"]
    num_rows = case["batch_size"] * (case["num_speculative_tokens"] + 1)
    experts_ms = 0.0
    if num_rows in H100_EXPERTS_MS and "gpu" in case:
        experts_ms = (case["num_layers"] - 1) * H100_EXPERTS_MS[num_rows]
        round_ms -= case["gpu"]["by_kind"]["experts"] / 1e3
        floor_ms -= case["floor_by_part_ms"]["target: experts"]
    return experts_ms + round_ms + (slower - 1) * floor_ms, experts_ms + slower * round_ms


def verdict(round_ms: float, must: float, aim: float) -> str:
    return "kept, aim reached" if round_ms <= aim else "kept" if round_ms <= must else "**missed**"


def range_verdict(low_ms: float, high_ms: float, must: float, aim: float) -> str:
    best, worst = verdict(low_ms, must, aim), verdict(high_ms, must, aim)
    if best == worst:
        return best
    return "kept, aim at the low end" if worst == "kept" else "kept at the low end"


def judged_table(cases: Sequence[Case]) -> str:
    """The rounds that something was asked of, beside it. Another card's are judged by their estimate."""
    lines = [
        "| draft | k | batch | floor | round ms | in lockstep | of floor | on an H100 | must / aim | vLLM |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in cases:
        shape = (case["num_speculative_tokens"], case["batch_size"])
        is_cheap = is_cheap_draft(case["settings"])
        wanted = WANTED_OF_A_CHEAP_DRAFT if is_cheap else WANTED
        is_asked = (case["preset"], case["num_layers"], case["prompt_len"]) == ("kimi-k2.5", 5, 1024)
        if "round_ms" not in case or not is_asked or shape not in wanted:
            continue
        lines.append(
            f"| {case['draft'] or '-'} | {shape[0]} | {shape[1]} | {case.get('floor_ms', 0):.2f}"
            f" | {case['round_ms']:.2f}"
            f" | {case.get('lockstep_round_ms', case['round_ms']):.2f} | {case.get('of_floor') or 0:.2f}"
            f" | {_judged(case, *wanted[shape])} | {'-' if is_cheap else peer_ms(case) or '-'} |"
        )
    return "\n".join(lines)


def _judged(case: Case, must: float, aim: float) -> str:
    """Two cells: the round on an H100, and what was asked with the verdict."""
    asked = f"{must:g} / {aim:g}"
    if "H100" in case["device"]:
        return f"measured | {asked}: {verdict(case['round_ms'], must, aim)}"
    if "floor_ms" not in case or "read_bytes_per_us" not in case:
        return f"- | {asked}"
    low, high = on_an_h100(case)
    return f"{low:.1f} to {high:.1f}, estimated | {asked}: {range_verdict(low, high, must, aim)}"
