"""What can be seen of another process on this machine."""

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
