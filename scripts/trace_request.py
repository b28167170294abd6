"""The files that a request goes through: counted by a trace of one request of kimi-nano on a CPU, in process.

    python scripts/trace_request.py [--tokens 24] [--k 3] [--list]

Prints how many product files are entered by the whole request, from its submission to its last token, and how many lie
between the engine's thread and the first attention kernel: the engine's own, and those that are entered from the call
of the target on. --list names them.
"""

import argparse
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from kimi_backend.config.settings import ServingSettings
from kimi_backend.engine.engine import Engine
from kimi_backend.runners.load.loading import load_pair
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.spec_decode.policy import PolicyName
from kimi_backend.types.request import GenerateRequest, SamplingParams, TokenDelta

ROOT = Path(__file__).resolve().parents[1]
NANO = ROOT / "demo/kimi-nano"
PACKAGES = ("backend/kimi_backend/", "kernels/kimi_kernels/")
KERNELS = ("mla_decode", "mla_prefill")
TARGET = "runners/target_runner.py"


@dataclass
class Trace:
    """Product files by the thread that enters them."""

    entered: set[str] = field(default_factory=set)
    to_attention: list[str] = field(default_factory=list)
    _since_call: list[str] = field(default_factory=list)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call, as `threading.setprofile` tells of it."""
        name = _product_file(frame) if event == "call" else None
        if name is None:
            return
        self.entered.add(name)
        if threading.current_thread().name != "kimi-engine" or self.to_attention:
            return
        if not self._since_call and name.endswith(TARGET) and frame.f_code.co_name != "describe":
            self._since_call = list(_stack(frame.f_back))
        if self._since_call:
            self._since_call.append(name)
            if name.startswith("kernels/") and frame.f_code.co_name in KERNELS:
                self.to_attention = list(dict.fromkeys(self._since_call))


def _product_file(frame: FrameType) -> str | None:
    path = frame.f_code.co_filename
    return next((path[path.index(package) :] for package in PACKAGES if package in path), None)


def _stack(frame: FrameType | None) -> Iterable[str]:
    """Product files from the thread's first call down to this frame."""
    names = []
    while frame is not None:
        name = _product_file(frame)
        if name is not None:
            names.append(name)
        frame = frame.f_back
    return reversed(names)


def trace_request(num_tokens: int, k: int) -> Trace:
    """One greedy request, in lockstep, through an engine that has served another one before."""
    settings = ServingSettings(
        checkpoint=str(NANO), draft=str(NANO / "draft"), device="cpu", speculation_policy="fixed", max_model_len=512
    )
    target, draft = load_pair(settings)
    engine = Engine(target, draft, settings=SchedulerSettings(speculation_policy=PolicyName.FIXED))
    trace = Trace()
    threading.setprofile(trace)
    engine.start()
    threading.setprofile(None)  # type: ignore[arg-type]
    engine.wait_until_ready(60.0)
    trace.entered.clear()  # the handshake's
    trace._since_call.clear()
    done = threading.Event()

    def sink(delta: TokenDelta) -> None:
        if delta.finish_reason is not None:
            done.set()

    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    sys.setprofile(trace)
    engine.submit(
        GenerateRequest(
            request_id="traced", prompt_token_ids=(5, 6, 7, 8), sampling=sampling, num_speculative_tokens=k
        ),
        sink,
    )
    sys.setprofile(None)
    done.wait()
    engine.stop()
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--list", action="store_true", help="name the files")
    options = parser.parse_args()
    trace = trace_request(options.tokens, options.k)
    for title, names in (
        ("entered by the request", sorted(trace.entered)),
        ("from the engine's thread to the first attention kernel", trace.to_attention),
    ):
        sys.stdout.write(f"{len(names):4d} files {title}\n")
        for name in names if options.list else ():
            sys.stdout.write(f"       {name}\n")


if __name__ == "__main__":
    main()
