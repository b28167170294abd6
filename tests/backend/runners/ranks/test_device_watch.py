"""A device that fails is noticed although nobody waits for it."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from kimi_backend.runners.ranks import device_watch
from support.waiting import PATIENCE_S

END_S = PATIENCE_S
NOBODY_WAITS = """
import os, time, torch
from kimi_backend.runners.ranks.device_watch import watch_device

def fail(error):
    print("failed:", type(error).__name__, flush=True)
    os._exit(7)

device = torch.device("cuda", 0)
zeros, places = torch.zeros(4, device=device), torch.tensor([9], device=device)
torch.cuda.synchronize()
watch_device(device, fail)
time.sleep(1.2)
print("well so far", flush=True)
zeros[places]
time.sleep(30)
"""


def test_an_error_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_watch, "_LOOK_S", 0.001)
    asked: list[int] = []
    told: list[Exception] = []

    def ask() -> None:
        asked.append(len(asked))
        if len(asked) == 3:
            raise RuntimeError("unspecified launch failure")

    thread = device_watch.watch(ask, told.append, lambda: asked.append(0))
    thread.join(END_S)
    assert not thread.is_alive()
    assert asked == [0, 1, 2]
    assert [str(error) for error in told] == ["unspecified launch failure"]


def test_a_cpu_is_not_watched() -> None:
    threads = threading.enumerate()
    device_watch.watch_device(torch.device("cpu"), lambda error: None)
    assert threading.enumerate() == threads


@pytest.mark.gpu
def test_a_failed_kernel_ends_a_process_that_waits_for_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOBODY_WAITS],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )
    assert done.returncode == 7, done.stderr[-2000:]
    assert done.stdout.startswith("well so far\nfailed: "), done.stdout
