"""Time steps of kimi-nano on a CPU, without a server: a verify of 1 to k + 1 rows, and a draft call of k tokens.

    python benchmarks/cpu_steps.py [--checkpoint DIR] [--k 0 1 2 3] [--temperature 1] [--repeats 15]

The plans of one request are recorded and run again and again, target and draft in turn; of each plan the fastest run
counts, so that what else the machine does matters little. Noise is drawn once and kept, so its price is not in it.
"""

import argparse
import threading
import time
from pathlib import Path
from typing import Any

from kimi_backend.config.settings import ServingSettings
from kimi_backend.engine.engine import Engine
from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.runners.load.loading import load_pair
from kimi_backend.runners.target_runner import TargetRunner
from kimi_backend.serving.spec_ensemble_server import scheduler_settings
from kimi_backend.spec_decode.protocols import Pending
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_backend.types.plan import DraftPlan, RunnerDescription, TargetPlan
from kimi_backend.types.request import GenerateRequest, SamplingParams, TokenDelta
from serving_suite.side_by_side import NANO, PROMPTS

READY_TIMEOUT_S = 60.0
Plans = list[TargetPlan | DraftPlan]


class Recorded:
    """A runner that notes what it is asked."""

    def __init__(self, runner: TargetRunner | DraftRunner, plans: Plans) -> None:
        self._runner, self._plans = runner, plans

    def describe(self) -> RunnerDescription:
        return self._runner.describe()

    @property
    def depth(self) -> int:
        return self._runner.depth

    def launch(self, plan: Any) -> Pending[Any]:
        self._plans.append(plan)
        return self._runner.launch(plan)


def record(engine: Engine, plans: Plans, request: GenerateRequest) -> Plans:
    """The plans of one request's decode steps."""
    plans.clear()
    done = threading.Event()

    def sink(delta: TokenDelta) -> None:
        if delta.finish_reason is not None:
            done.set()

    engine.submit(request, sink)
    done.wait()
    return [plan for plan in plans if len(plan.rows.token_ids) <= 8]


def fastest_ms(target: TargetRunner, draft: DraftRunner, plans: Plans, repeats: int) -> list[float]:
    """[plans] of so many runs each."""
    best = [float("inf")] * len(plans)
    for _ in range(repeats):
        for index, plan in enumerate(plans):
            start = time.perf_counter()
            if isinstance(plan, TargetPlan):
                target.launch(plan).wait()
            else:
                draft.launch(plan).wait()
            best[index] = min(best[index], 1e3 * (time.perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=NANO, help="with a draft in its folder draft")
    parser.add_argument("--k", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    settings = ServingSettings(
        checkpoint=str(args.checkpoint),
        draft=str(args.checkpoint / "draft"),
        device="cpu",
        speculation_policy="fixed",
        max_model_len=1024,
        max_speculative_tokens=max(args.k),
    )
    target, draft = load_pair(settings)
    assert draft is not None
    tokenizer, plans = load_tokenizer(str(args.checkpoint)), Plans()
    engine = Engine(Recorded(target, plans), Recorded(draft, plans), settings=scheduler_settings(settings))
    engine.start()
    engine.wait_until_ready(READY_TIMEOUT_S)
    sampling = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, ignore_eos=True, seed=1)
    prompt = tuple(tokenizer.encode(PROMPTS[1]))
    recorded = {
        k: record(
            engine,
            plans,
            GenerateRequest(request_id=str(k), prompt_token_ids=prompt, sampling=sampling, num_speculative_tokens=k),
        )
        for k in args.k
    }
    engine.stop()
    print("| k | target, ms | draft, ms |\n|---|---|---|")
    for k, own in recorded.items():
        best = fastest_ms(target, draft, own, args.repeats)
        verifies = [ms for ms, plan in zip(best, own, strict=True) if isinstance(plan, TargetPlan)]
        drafts = [ms for ms, plan in zip(best, own, strict=True) if isinstance(plan, DraftPlan)]
        drafted = f"{sum(drafts) / len(drafts):.2f}" if drafts else "-"
        print(f"| {k} | {sum(verifies) / len(verifies):.2f} | {drafted} |")


if __name__ == "__main__":
    main()
