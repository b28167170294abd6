"""Pictures of a report, one for each suite."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Report = dict[str, Any]
Lines = dict[str, list[dict[str, Any]]]


def lines_of(report: Report) -> Lines:
    """Cases by label, each line in order of x."""
    lines: Lines = {}
    for case in report["cases"]:
        lines.setdefault(case["label"], []).append(case)
    return {label: sorted(cases, key=lambda c: c["x"]) for label, cases in lines.items()}


def _curve(axes: Axes, lines: Lines, y: Callable[[dict[str, Any]], float | None], style: str = "o-") -> None:
    for label, cases in lines.items():
        points = [(case["x"], y(case)) for case in cases]
        axes.plot(*zip(*[(x, value) for x, value in points if value is not None], strict=True), style, label=label)


def _acceptance_by_position(axes: Axes, lines: Lines) -> None:
    speculating = [c for cases in lines.values() for c in cases if c["speculation"]]
    for case in speculating:
        rates = case["speculation"]["acceptance_per_position"]
        axes.plot(range(1, len(rates) + 1), rates, "o-", label=f"{case['x']:g}")
    axes.set(xlabel="draft position", ylabel="accepted / proposed", ylim=(0, 1))
    axes.set_xticks(range(1, 1 + max(len(c["speculation"]["acceptance_per_position"]) for c in speculating)))


def draw_concurrency(figure: Figure, report: Report) -> None:
    """Latency against throughput, speed-up against concurrency, acceptance per position."""
    lines = lines_of(report)
    latency, speedup, acceptance = figure.subplots(1, 3)
    for label, cases in lines.items():
        throughput = [c["output_tokens_per_second"] for c in cases]
        latency.plot(throughput, [c["inter_token_ms"]["p50"] for c in cases], "o-", label=label)
        for case, at in zip(cases, throughput, strict=True):
            latency.annotate(
                f"{case['x']:g}", (at, case["inter_token_ms"]["p50"]), xytext=(4, 4), textcoords="offset points"
            )
    latency.set(xlabel="output tokens/s (points: streams)", ylabel="time a token, median, ms", ylim=(0, None))
    latency.legend()
    fast, plain = (cases for _, cases in sorted(lines.items(), key=lambda item: item[0] == "plain"))
    streams = [c["x"] for c in plain]
    pairs = list(zip(fast, plain, strict=True))
    ratios = [f["output_tokens_per_second"] / p["output_tokens_per_second"] for f, p in pairs]
    speedup.plot(streams, ratios, "o-", label="throughput")
    speedup.plot(
        streams, [p["request_ms"]["p50"] / f["request_ms"]["p50"] for f, p in pairs], "s--", label="request time"
    )
    speedup.axhline(1, color="grey", linewidth=0.8)
    speedup.set_xscale("log", base=2)
    speedup.set_xticks(streams, [f"{s:g}" for s in streams])
    speedup.set(xlabel="streams", ylabel="speed-up by speculation", ylim=(0, None))
    speedup.legend()
    _acceptance_by_position(acceptance, lines)
    acceptance.legend(title="streams")


def draw_rate(figure: Figure, report: Report) -> None:
    """First token and whole request against the offered rate."""
    lines = lines_of(report)
    first, whole = figure.subplots(1, 2)
    for axes, key, name in ((first, "first_token_ms", "first token"), (whole, "request_ms", "request")):
        _curve(axes, lines, lambda c, k=key: c[k]["p50"])
        axes.set_prop_cycle(None)
        _curve(axes, {f"{label}, p90": cases for label, cases in lines.items()}, lambda c, k=key: c[k]["p90"], "o--")
        axes.set(xlabel="offered requests/s", ylabel=f"{name}, ms (median and p90)", ylim=(0, None))
    whole.legend()


def draw_long_prompt(figure: Figure, report: Report) -> None:
    """First token and time a token against the prompt's length."""
    lines = {label: [{**c, "x": c["mean_prompt_tokens"]} for c in cases] for label, cases in lines_of(report).items()}
    first, later = figure.subplots(1, 2)
    _curve(first, lines, lambda c: c["first_token_ms"]["p50"])
    first.set(xlabel="prompt tokens", ylabel="first token, median, ms", ylim=(0, None))
    _curve(later, lines, lambda c: c["inter_token_ms"]["p50"])
    later.set(xlabel="prompt tokens", ylabel="time a token, median, ms", ylim=(0, None))
    later.legend()


def draw_shared_prefix(figure: Figure, report: Report) -> None:
    """First token with the prefix cache and without."""
    axes = figure.subplots()
    cases = report["cases"]
    labels = [f"{c['label']}\n{c['cached_share']:.0%} of prompt tokens cached" for c in cases]
    for offset, percentile in ((-0.2, "p50"), (0.2, "p90")):
        places = [i + offset for i in range(len(cases))]
        axes.bar(places, [c["first_token_ms"][percentile] for c in cases], 0.38, label=percentile)
    axes.set_xticks(range(len(cases)), labels)
    axes.set_ylabel(f"first token, ms ({cases[0]['mean_prompt_tokens']:.0f} prompt tokens)")
    axes.legend()


DRAWINGS: dict[str, tuple[Callable[[Figure, Report], None], float]] = {
    "concurrency": (draw_concurrency, 13),
    "rate": (draw_rate, 10),
    "long-prompt": (draw_long_prompt, 10),
    "shared-prefix": (draw_shared_prefix, 6),
}


def draw(report: Report, path: Path) -> None:
    """Write the suite's picture."""
    drawing, width = DRAWINGS[report["suite"]]
    figure = Figure(figsize=(width, 4), layout="constrained")
    drawing(figure, report)
    title = f"{report['suite']}: {report['what']}"
    figure.suptitle("\n".join(textwrap.wrap(title, round(11 * width))), fontsize=10)
    figure.savefig(path, dpi=110)
