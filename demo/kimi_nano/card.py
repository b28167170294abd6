"""Writes the measured figures into the model card, between its two markers."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures: python -m kimi_nano card -->", "<!-- end of figures -->"
APART = ("texts that do not loop", "looping texts")
GREEDY_BAR, COUPLED_BAR = 2.2, 1.9


def write_card(reports: Sequence[Path], card: Path, probes: Sequence[Path] = ()) -> None:
    """Replace what stands between the markers of `card` by tables.

    Args:
        reports: what `evaluate` wrote; of further ones only the drafts are taken, measured on the same target.
        probes: what `probes` wrote, each of other drafts.
    """
    text = card.read_text()
    report, *others = (json.loads(path.read_text()) for path in reports)
    for other in others:
        report["drafts"] |= other["drafts"]
    parts = [figures(report)]
    if probes:
        parts.append(_probes({draft: rows for path in probes for draft, rows in json.loads(path.read_text()).items()}))
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    card.write_text(f"{before}{BEGIN}\n\n" + "\n".join(parts) + f"\n{END}{after}")


def figures(report: dict[str, Any]) -> str:
    """Markdown."""
    parts = [_held_out(report["held_out"]), _texts(report), _acceptance(report), _wrong(report), _samples(report)]
    return "\n".join(parts)


def _probes(probes: dict[str, list[dict[str, Any]]]) -> str:
    rows = []
    for draft, measured in probes.items():
        for row in measured:
            lengths = [f"{row[name]:.2f}" for name in ("file's acceptance length", "chosen acceptance length")]
            verdict = "the true setting" if row["is the truth"] else row["chosen"]
            errors, rivals = f"{row['standard errors']:.1f}", _rivals(row["chosen"], row["not told apart"])
            rows.append((draft, str(row["prompts"]), row["false statement"], *lengths, errors, verdict, rivals))
    heads = ("draft", "prompts", "false statement in its config.json", "accepted as the file says", "as the probe says")
    return _table((*heads, "standard errors", "the probe chooses", "not told apart from"), rows)


def _rivals(chosen: str, rivals: Sequence[str]) -> str:
    """List what rivals have in place of the chosen setting's parts, each once."""
    own = _setting_parts(chosen)
    return ", ".join(dict.fromkeys(part for rival in rivals for part in _setting_parts(rival) if part not in own))


def _setting_parts(name: str) -> list[str]:
    return re.split("[;,] ", name)


def _held_out(held_out: dict[str, Any]) -> str:
    return _table(
        ("held-out files", "tokens", "nats/token", "nats/byte", "gzip -9, each file", "gzip -9, one stream"),
        [
            (
                str(held_out["files"]),
                f"{held_out['tokens']:,}",
                f"{held_out['nats_per_token']:.3f}",
                f"{held_out['nats_per_byte']:.3f}",
                f"{held_out['gzip_nats_per_byte_each_file']:.3f}",
                f"{held_out['gzip_nats_per_byte_one_stream']:.3f}",
            )
        ],
    )


def _texts(report: dict[str, Any]) -> str:
    rows = []
    for temperature, measures in report["text"].items():
        lookup, apart = measures["prompt_lookup"], measures["distinct_4gram_share_not_looping"]
        rows.append(
            (
                temperature,
                f"{measures['distinct_4gram_share']:.2f}",
                "" if apart is None else f"{apart:.2f}",
                f"{measures['looping_prompts']} of {report['num_prompts']}",
                *_lengths(lookup),
            )
        )
    heads = ("temperature", "distinct 4-grams, all texts", "texts that do not loop", "looping texts")
    return _table((*heads, "prompt lookup: acceptance length", *APART), rows)


def _lengths(numbers: dict[str, Any]) -> tuple[str, ...]:
    """Acceptance length of all texts, of those that do not loop, of those that do."""
    parts = (numbers, numbers.get("not looping"), numbers.get("looping"))
    return tuple(f"{p['acceptance_length']:.2f} ± {p['standard_error']:.2f}" if p else "" for p in parts)


def _acceptance(report: dict[str, Any]) -> str:
    rows = []
    for draft, measured in report["drafts"].items():
        for temperature, rules in measured.items():
            if temperature == "wrong settings":
                continue
            for rule, numbers in rules.items():
                length, *apart = _lengths(numbers)
                positions = [f"{share:.0%}" for share in numbers["per_position"]]
                rows.append((draft, temperature, rule, length, *positions, *apart, _bar(temperature, rule, numbers)))
    heads = ("draft", "", "rule", "acceptance length", "≥ 1", "≥ 2", "≥ 3", *APART, "bar")
    return _table(heads, rows)


def _bar(temperature: str, rule: str, numbers: dict[str, Any]) -> str:
    bar = {("temperature 0", "greedy"): GREEDY_BAR, ("temperature 1", "coupled"): COUPLED_BAR}.get((temperature, rule))
    if bar is None:
        return ""
    return f"{bar}: {'met' if numbers['acceptance_length'] >= bar else 'NOT met'}"


def _wrong(report: dict[str, Any]) -> str:
    rows = []
    for draft, measured in report["drafts"].items():
        for name, numbers in measured.get("wrong settings", {}).items():
            errors = numbers["standard_errors_below"]
            verdict = "" if errors > 3 else "less than 3"
            rows.append((draft, name, f"{numbers['acceptance_length']:.2f}", f"{errors:.1f}", verdict))
    return _table(("draft", "wrong setting, greedy", "acceptance length", "standard errors below", ""), rows)


def _samples(report: dict[str, Any]) -> str:
    samples = report["samples"]
    temperature = samples[0]["temperature"]
    parts = [f"Texts at temperature {temperature}; the prompt's last line, then what the target wrote:", ""]
    for sample in samples:
        end = sample["prompt_end"].rstrip("\n").rsplit("\n", 1)[-1]
        continuation = sample["continuation"].replace("```", "'''")
        parts += [f"`{sample['file']}`", "", "```text", end, continuation, "```", ""]
    return "\n".join(parts)


def _table(heads: tuple[str, ...], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
