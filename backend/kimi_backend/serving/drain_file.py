"""The file that orders a drain, and the one beside it that says how many requests are left.

Triton Server 24.10 tells a model nothing before it stops. So whoever runs the server writes this file, and
`spec_ensemble` looks for it.
"""

import contextlib
import math
import os
from pathlib import Path

DRAIN_FILE_VARIABLE = "KIMI_DRAIN_FILE"
_LEFT_SUFFIX = ".left"


class DrainFile:
    """One server's. Both sides write whole files by renaming, so that no half of one is read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left = path.with_name(path.name + _LEFT_SUFFIX)

    def order(self, limit_s: float) -> None:
        """Ask for a drain; a later order replaces an earlier one.

        Args:
            limit_s: seconds, from the first order on, that live requests may take to end by themselves.
        """
        _write(self._path, f"{limit_s:g}")

    @property
    def limit_s(self) -> float | None:
        """Read what was ordered; None: nothing. An empty file, as `touch` makes it, gives live requests no time."""
        text = _read(self._path)
        if text is None:
            return None
        with contextlib.suppress(ValueError):
            if not math.isnan(limit_s := float(text)):
                return limit_s
        return 0.0

    def report(self, num_left: int) -> None:
        """Say how many requests have not had their last response."""
        _write(self._left, str(num_left))

    @property
    def num_left(self) -> int | None:
        """Read what was reported last; None: nothing yet."""
        text = _read(self._left)
        return None if text is None else int(text)


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
