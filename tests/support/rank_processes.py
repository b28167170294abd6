"""The processes of a model's other ranks, as seen from outside."""

import time
from pathlib import Path

from kimi_backend.processes import is_alive

GONE_WITHIN_S = 30


def rank_pids(stub: int) -> list[int]:
    """Process ids of the ranks that a model's process has started."""
    children = " ".join(path.read_text() for path in Path(f"/proc/{stub}/task").glob("*/children")).split()
    commands = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    return [child for child, command in commands.items() if b"kimi_backend.rank_worker.worker" in command]


def wait_until_gone(process_ids: list[int]) -> None:
    """All of them."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while any(is_alive(process_id) for process_id in process_ids):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.02)
