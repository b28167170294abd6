"""The card's clock and power beside a measurement: a card that reaches its power limit slows down."""

import statistics
import subprocess
import threading
import time
from collections import Counter
from typing import Any

import torch

SAMPLED = "clocks.sm,power.draw.instant,clocks_event_reasons.active"
SAMPLE_MS = 20
POWER_LIMIT = 0x4
"""The bit of `clocks_event_reasons` that says: the clock is held down by the software's power limit."""


class CardWatch:
    """`nvidia-smi` in the background."""

    def __init__(self) -> None:
        query = [f"--query-gpu={SAMPLED}", "--format=csv,noheader,nounits", "-lms", str(SAMPLE_MS)]
        uuid = str(torch.cuda.get_device_properties(0).uuid).removeprefix("GPU-")
        command = ["nvidia-smi", "-i", f"GPU-{uuid}", *query]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._samples: list[tuple[float, list[str]]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._samples.append((time.perf_counter(), [part.strip() for part in line.split(",")]))

    def between(self, start_s: float, end_s: float) -> dict[str, Any]:
        """Medians between two times of `time.perf_counter`, and the share of samples in which power held the clock
        down."""
        found = [values for at, values in self._samples if start_s <= at <= end_s]
        if not found:
            return {}
        reasons = Counter(int(values[2], 16) & POWER_LIMIT for values in found)
        return {
            "sm_mhz": statistics.median(float(values[0]) for values in found),
            "watts": statistics.median(float(values[1]) for values in found),
            "power_limited_share": round(reasons[POWER_LIMIT] / len(found), 2),
        }

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
