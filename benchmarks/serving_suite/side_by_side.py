"""Servers beside each other on one CPU, and cases that take turns on them."""

import argparse
import itertools
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from kimi_backend.config.settings import ServingSettings
from kimi_backend.hosting.embedded_server import EmbeddedServer, ServerPorts
from kimi_backend.hosting.settings_to_server import make_server

NANO = (Path(__file__).parents[2] / "demo" / "kimi-nano").resolve()
PROMPTS = (
    "def fibonacci(n):\n    ",
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n        ",
    "import json\nfrom pathlib import Path\n\n\ndef load_config(path):\n    ",
    "    def test_raises_on_empty_input(self):\n        with self.assertRaises(ValueError):\n            ",
    "def mean(values):\n    total = 0\n    for value in values:\n        ",
    "        if isinstance(other, self.__class__):\n            return ",
)

T = TypeVar("T")


@dataclass(slots=True)
class ServedCase:
    """One way of serving and what its turns measured."""

    name: str
    server: EmbeddedServer
    k: int | None
    """Draft tokens that each request asks for; None leaves them to the server."""
    prompts: Sequence[str] = PROMPTS
    rates: list[float] = field(default_factory=list)
    """Output tokens a second, one entry a turn."""
    texts: list[str] = field(default_factory=list)
    """The texts of the last turn, in an order that is the same for every case."""

    def request(self, number: int, temperature: float, max_tokens: int) -> dict[str, Any]:
        """The fields of a turn's request: the same for every case but for k."""
        fields = {
            "text_input": self.prompts[number % len(self.prompts)],
            "seed": number,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "ignore_eos": True,
        }
        return fields if self.k is None else fields | {"num_speculative_tokens": self.k}


def in_turn(cases: list[T], turn: int) -> list[T]:
    """All cases, another one first each turn: whatever else the machine does falls on all alike."""
    first = turn % len(cases)
    return cases[first:] + cases[:first]


@contextmanager
def servers_side_by_side(
    settings: Mapping[str, ServingSettings], first_port: int | None = None
) -> Iterator[dict[str, EmbeddedServer]]:
    """A server for each name, all ready; stopped at the end. They start one after the other: none times its steps while
    another one loads.

    Args:
        first_port: the first of three in a row for each server; None: any that are free.
    """
    started: dict[str, EmbeddedServer] = {}
    ports = None if first_port is None else itertools.count(first_port)
    with tempfile.TemporaryDirectory(prefix="kimi_side_by_side_") as folder:
        try:
            for name, own in settings.items():
                own_ports = ports and ServerPorts(http=next(ports), grpc=next(ports), metrics=next(ports))
                log_file = Path(folder) / f"{name}.log"
                server = make_server(own, ports=own_ports, log_file=log_file, ends_with_parent=True)
                server.start()
                started[name] = server
                server.wait_until_ready()
            yield started
        finally:
            for server in started.values():
                server.stop()


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Models, drafts, lengths and the report."""
    parser.add_argument("--checkpoint", type=lambda path: Path(path).resolve(), default=NANO)
    parser.add_argument("--draft", type=lambda path: Path(path).resolve(), default=NANO / "draft")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)


def provenance() -> dict[str, Any]:
    """Collect what a report must say of its making."""
    return {
        "command": sys.argv[1:],
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores",
    }
