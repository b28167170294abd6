"""A job's findings: lines that hold or do not, and the commands that a job runs."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 570


@dataclass
class Verdict:
    """The lines of a verdict, in the order in which they were found."""

    lines: list[tuple[bool | None, str]] = field(default_factory=list)

    def ask(self, holds: bool, text: str) -> None:
        """Add what must hold."""
        self.lines.append((holds, text))

    def tell(self, text: str) -> None:
        """Add a figure that nothing is asked of."""
        self.lines.append((None, text))

    @property
    def holds(self) -> bool:
        """True if everything that was asked holds, and something was."""
        asked = [holds for holds, _ in self.lines if holds is not None]
        return bool(asked) and all(asked)

    def text(self, title: str) -> str:
        """The lines, under their title and above the word that sums them up."""
        marks = {True: "holds ", False: "FAILS ", None: "       "}
        lines = [f"  {marks[holds]} {text}" for holds, text in self.lines]
        return "\n".join([title, *lines, "VERDICT: " + ("passed" if self.holds else "FAILED")])


def run_command(arguments: list[str], **environment: str) -> int:
    """Run a Python command of the repository to its end, its output shown; its exit status, 124 after `LIMIT_S`."""
    paths = [str(REPOSITORY / name) for name in ("kernels", "backend", "client", "benchmarks")]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    values = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
    try:
        return subprocess.run(
            [sys.executable, *arguments], cwd=REPOSITORY, env=values, timeout=LIMIT_S, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return 124
