"""A progress bar for reading or writing many bytes: silent when short, a bar on a terminal, log lines elsewhere."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kimi_backend.checkpoint.tensor_source import SourceWrapper, TensorSource

QUIET_S = 2.0
LOG_PERIOD_S = 10.0

Advance = Callable[[int], None]
"""Called with a number of bytes, or pieces of work, that have just been done."""

_logger = logging.getLogger("kimi_backend.checkpoint")


def no_progress(num_bytes: int) -> None:
    """An `Advance` that shows nothing."""


@contextmanager
def byte_progress(description: str, total_bytes: int) -> Iterator[Advance]:
    """Show how far a transfer is: a bar on stderr once it has taken 2 s, log lines where stderr is no terminal.

    Args:
        total_bytes: what all calls of the yielded `Advance` are expected to add up to.
    """
    if sys.stderr.isatty():
        with _terminal_progress(description, total_bytes) as advance:
            yield advance
        return
    started = last_shown = time.monotonic()
    done = 0

    def log(num_bytes: int) -> None:
        nonlocal done, last_shown
        done += num_bytes
        now = time.monotonic()
        if now - last_shown >= LOG_PERIOD_S:
            last_shown = now
            rate = done / (now - started)
            _logger.info(
                "%s done_gb=%.1f total_gb=%.1f gb_per_s=%.2f", description, done / 1e9, total_bytes / 1e9, rate / 1e9
            )

    yield log


@contextmanager
def count_progress(description: str, total: int) -> Iterator[Advance]:
    """Show how many of some pieces of work are done: a bar on stderr once it has taken 2 s, log lines where stderr is
    no terminal; one line at the end in any case."""
    started = last_shown = time.monotonic()
    done = 0

    def log(count: int) -> None:
        nonlocal done, last_shown
        done += count
        if time.monotonic() - last_shown >= LOG_PERIOD_S:
            last_shown = time.monotonic()
            _logger.info("%s done=%d total=%d", description, done, total)

    if total and sys.stderr.isatty():
        with _terminal_progress(description, total, in_bytes=False) as advance:
            yield advance
    else:
        yield log
    if total:
        _logger.info("%s done=%d total=%d seconds=%.1f", description, total, total, time.monotonic() - started)


@contextmanager
def _terminal_progress(description: str, total: int, in_bytes: bool = True) -> Iterator[Advance]:
    # Imported here: servers and tests that show nothing need not pay for it.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *counts,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = progress.add_task(description, total=total)
    started = time.monotonic()
    is_shown = False

    def show(num_bytes: int) -> None:
        nonlocal is_shown
        if not is_shown and time.monotonic() - started >= QUIET_S:
            is_shown = True
            progress.start()
        progress.advance(task, num_bytes)

    try:
        yield show
    finally:
        if is_shown:
            progress.stop()


@dataclass(frozen=True, slots=True)
class WatchedTensors(SourceWrapper):
    """A source that reports the bytes it hands out."""

    source: TensorSource
    advance: Advance

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        tensor = self.source.read(name, dim, start, stop)
        self.advance(tensor.numel() * tensor.element_size())
        return tensor
