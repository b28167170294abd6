"""What can be seen of another process on this machine, and what a long-lived one does to itself."""

import gc
from pathlib import Path

_DEAD_STATES = ("Z", "X")


def is_alive(process_id: int, proc: Path = Path("/proc")) -> bool:
    """Whether a process runs: one that has ended but was not waited for does not. True where /proc cannot tell."""
    if not (proc / "self").exists():
        return True
    try:
        state = (proc / str(process_id) / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return False
    return state not in _DEAD_STATES


def start_ticks(process_id: int, proc: Path = Path("/proc")) -> str:
    """When it started, in the machine's clock ticks: tells it from a later process of the same id. Empty where /proc
    cannot tell."""
    try:
        return (proc / str(process_id) / "stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return ""


def freeze_what_is_loaded() -> None:
    """Take all objects of now out of the garbage collector's sight: a look at all of them, modules and a tokenizer's
    tables included, would hold a step up for tens of milliseconds. Call it once a server has loaded everything."""
    gc.collect()
    gc.freeze()
