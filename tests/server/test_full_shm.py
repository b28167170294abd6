"""Bodies that /dev/shm has no room for are refused, and the server goes on: it set its regions aside at the start."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.private_shm import in_private_shm


@pytest.mark.soak
def test_a_full_shared_memory_refuses_large_bodies_and_serves_small_ones(checkpoint):
    script = Path(__file__).resolve().parents[2] / "scripts/full_shm.py"
    command = in_private_shm(256, [sys.executable, str(script), str(checkpoint)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["small"] == ["200"] * 3, found
    assert set(found["large"]) <= {"400", "413", "500", "503"}, found
    assert found["code"] is None
