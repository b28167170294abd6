"""Reads the Prometheus text format, as much of it as Triton Server writes."""

import re
import urllib.request

from support.waiting import PATIENCE_S

_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse_samples(text: str) -> Samples:
    """(name, labels) -> value."""
    samples: Samples = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        assert match is not None, line
        key = (match[1], frozenset(_LABEL.findall(match[2] or "")))
        assert key not in samples, f"given twice: {line}"
        samples[key] = float(match[3])
    return samples


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as reply:
        return reply.read().decode()


def value(samples: Samples, name: str, **labels: str) -> float:
    """The sample of this name that has these labels, whatever else it has."""
    wanted = set(labels.items())
    found = [v for (sample_name, given), v in samples.items() if sample_name == name and wanted <= given]
    assert len(found) == 1, f"{name} {labels}: {len(found)} samples"
    return found[0]
