"""The commands that README and docs tell a reader to run."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_ASSIGNED = r"(?:[A-Z_]+=\S+ +)*"
_PROGRAMS = r"(?:\.venv/bin/|\./|docker/)?(?:make|kimi|python|curl|docker|pip|cp|cd|aiperf|perf_analyzer|\w+\.sh)"
_COMMAND = re.compile(rf"{_ASSIGNED}{_PROGRAMS}\s.*|\./\S+\.sh|{_ASSIGNED}docker/\S+\.sh|[A-Z]=.*|\$[A-Z] .*")


@dataclass(frozen=True)
class DocumentedCommand:
    """One command of a fenced block, on one line and without its comment."""

    page: str
    text: str


def pages() -> list[str]:
    """README and everything under docs/ and demo/, as git lists it; notes on old runs are not for readers to run."""
    listed = subprocess.run(
        ["git", "ls-files", "README.md", "docs/*.md", "demo/*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [page for page in listed.split() if (ROOT / page).exists()]


def commands_of(page: str) -> list[DocumentedCommand]:
    """The commands of a page in their order. Blocks with a language other than a shell's hold none."""
    found = []
    for language, block in _FENCE.findall((ROOT / page).read_text()):
        if language in ("", "bash", "sh"):
            lines = map(_bare, re.sub(r"\s*\\\n\s*", " ", block).splitlines())
            found += [DocumentedCommand(page, line) for line in lines if _COMMAND.fullmatch(line)]
    return found


def all_commands() -> list[DocumentedCommand]:
    """Those of every page."""
    return [command for page in pages() for command in commands_of(page)]


def _bare(line: str) -> str:
    return re.sub(r"\s+# .*", "", line).strip()
