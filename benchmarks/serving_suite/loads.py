"""The requests that are sent: prompts, and the four suites made of them.

Prompts are code, not random tokens: a draft collapses on noise, and a benchmark of noise says nothing of speculation.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ROOT / "benchmarks/prompts.json"
SOURCES = ROOT / "backend/kimi_backend"
REQUESTS_A_STREAM = 4
"""Each of the concurrent streams sends at least so many requests, so that the ends of a run weigh little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """Common to all suites."""

    num_speculative_tokens: int = 3
    max_tokens: int = 48
    num_requests: int = 16
    """The requests of a case, at least."""
    temperature: float = 0.0
    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16)
    rates: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    """Requests a second, Poisson."""
    prompt_characters: tuple[int, ...] = (400, 1600, 4800)
    prefix_characters: int = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run of perf_analyzer."""

    label: str
    """The line of a plot that it belongs to."""
    x: float
    """Its place on that line."""
    requests: list[dict[str, Any]]
    arguments: list[str] = field(default_factory=list)
    """perf_analyzer's, for the load."""


def code_prompts() -> Iterator[str]:
    """The short prompts of prompts.json, again and again."""
    data = json.loads(PROMPTS.read_text())["data"]
    return itertools.cycle([entry["text_input"][0] for entry in data])


def source_text() -> str:
    """This project's own Python, as one long text."""
    return "\n\n".join(path.read_text() for path in sorted(SOURCES.rglob("*.py")))


def _requests(
    prompts: Iterator[str], count: int, k: int, settings: LoadSettings, salt: Callable[[int], str | None]
) -> list[dict[str, Any]]:
    requests = []
    for index in range(count):
        fields: dict[str, Any] = {
            "text_input": next(prompts),
            "max_tokens": settings.max_tokens,
            "ignore_eos": True,
            "temperature": settings.temperature,
            "seed": index,
            "num_speculative_tokens": k,
        }
        if (cache_salt := salt(index)) is not None:
            fields["cache_salt"] = cache_salt
        requests.append(fields)
    return requests


def _labels(settings: LoadSettings) -> tuple[tuple[str, int], ...]:
    return ((f"k = {settings.num_speculative_tokens}", settings.num_speculative_tokens), ("plain", 0))


def concurrency_sweep(settings: LoadSettings) -> Iterator[Case]:
    """Cases of so many streams at once, with speculation and without."""
    for concurrency in settings.concurrencies:
        count = max(settings.num_requests, REQUESTS_A_STREAM * concurrency)
        for label, k in _labels(settings):
            requests = _requests(code_prompts(), count, k, settings, lambda i: None)
            arguments = [f"--concurrency-range={concurrency}"]
            yield Case(label=label, x=concurrency, requests=requests, arguments=arguments)


def rate_sweep(settings: LoadSettings) -> Iterator[Case]:
    """Requests that come when they come: Poisson arrivals of a given rate, whatever the server does."""
    for rate in settings.rates:
        for label, k in _labels(settings):
            requests = _requests(code_prompts(), settings.num_requests, k, settings, lambda i: None)
            # Start and end: with one number below 1 it believes that a range was asked for.
            arguments = [f"--request-rate-range={rate}:{rate}", "--request-distribution=poisson"]
            yield Case(label=label, x=rate, requests=requests, arguments=arguments)


def long_prompts(settings: LoadSettings) -> Iterator[Case]:
    """Prompts of growing length, each another piece of code, two streams."""
    text = source_text()
    for length in settings.prompt_characters:
        pieces = [text[start : start + length] for start in range(0, settings.num_requests * length, length)]
        for label, k in _labels(settings):
            # A salt for each line: the second would find what the first has cached.
            requests = _requests(iter(pieces), len(pieces), k, settings, lambda i, salt=label: salt)
            yield Case(label=label, x=length, requests=requests, arguments=["--concurrency-range=2"])


def shared_prefix(settings: LoadSettings) -> Iterator[Case]:
    """The same long beginning in every request, with the prefix cache and with a salt for each request."""
    prefix = source_text()[: settings.prefix_characters]
    prompts = [f"{prefix}\n\n{prompt}" for prompt in itertools.islice(code_prompts(), settings.num_requests)]
    for label, is_shared in (("shared", True), ("salted, never shared", False)):
        k = settings.num_speculative_tokens
        requests = _requests(iter(prompts), len(prompts), k, settings, lambda i, s=is_shared: None if s else f"{i}")
        yield Case(label=label, x=len(prefix), requests=requests, arguments=["--concurrency-range=2"])


SUITES: dict[str, Callable[[LoadSettings], Iterator[Case]]] = {
    "concurrency": concurrency_sweep,
    "rate": rate_sweep,
    "long-prompt": long_prompts,
    "shared-prefix": shared_prefix,
}
