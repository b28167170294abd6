"""kimi-nano on a GPU, in process: its runners with pools of any size and content, and requests for it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kimi_backend.config.settings import ServingSettings
from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.runners.load.loading import load_pair
from kimi_backend.runners.target_runner import TargetRunner
from kimi_backend.spec_decode.protocols import Pending
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_backend.types.plan import DraftPlan, DraftReply, RunnerDescription, TargetPlan, TargetReply
from kimi_backend.types.request import GenerateRequest, SamplingParams

NANO = Path(__file__).resolve().parents[2] / "demo/kimi-nano"
PROMPTS = (
    "def fibonacci(n):\n    ",
    "class Stack:\n    def push(self, item):\n        ",
    "import json\n\ndef load_config(path):\n    ",
    "# Sort a list of dictionaries by key\ndef sort_by(items, key):\n    ",
    "for line in open(path):\n    ",
    "def main() -> None:\n    parser = argparse.ArgumentParser()\n",
    "x = [",
    "try:\n    import numpy as np\nexcept ImportError:\n    ",
)
BLOCK_SIZE = 16
MAX_MODEL_LEN = 512


def nano_settings(**changes: Any) -> ServingSettings:
    """Settings on the GPU, with small blocks."""
    values: dict[str, Any] = {
        "checkpoint": str(NANO),
        "draft": str(NANO / "draft"),
        "device": "cuda",
        "speculation_policy": "fixed",
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
    }
    return ServingSettings(**{**values, **changes})


@dataclass
class SwitchedTarget:
    """A target that can be replaced between two steps, as by a restart."""

    runner: TargetRunner

    def describe(self) -> RunnerDescription:
        return self.runner.describe()

    @property
    def depth(self) -> int:
        return self.runner.depth

    def launch(self, plan: TargetPlan) -> Pending[TargetReply]:
        return self.runner.launch(plan)


@dataclass
class SwitchedDraft:
    """A draft that can be replaced likewise."""

    runner: DraftRunner

    def describe(self) -> RunnerDescription:
        return self.runner.describe()

    @property
    def depth(self) -> int:
        return self.runner.depth

    def launch(self, plan: DraftPlan) -> Pending[DraftReply]:
        return self.runner.launch(plan)


Pair = tuple[SwitchedTarget, SwitchedDraft]


def nano_pair(*, kernels: str, num_blocks: int) -> Pair:
    """Both runners, with CUDA graphs where the kernels allow them."""
    target, draft = load_pair(nano_settings(kernels=kernels, kv_tokens=num_blocks * BLOCK_SIZE))
    assert draft is not None
    return SwitchedTarget(target), SwitchedDraft(draft)


def fill_pool(runner: TargetRunner | DraftRunner, value: float) -> None:
    """Every element, whoever wrote it."""
    runner._pool.tensor.fill_(value)


def nano_requests(count: int, max_tokens: int) -> list[GenerateRequest]:
    """Greedy and sampled in turn, k from 0 to 7, prompts of different lengths."""
    tokenizer = load_tokenizer(str(NANO))
    requests = []
    for i in range(count):
        prompt = tokenizer.encode(PROMPTS[i % len(PROMPTS)] * (1 + i % 3))
        sampling = SamplingParams(
            temperature=float(i % 2),
            seed=i,
            max_tokens=max_tokens - i % 5,
            ignore_eos=True,
            top_p=0.95 if i % 4 else 1.0,
        )
        requests.append(
            GenerateRequest(
                request_id=str(i),
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                num_speculative_tokens=(3, 7, 0, 1, 5)[i % 5],
            )
        )
    return requests


def without_speculation(requests: list[GenerateRequest]) -> list[GenerateRequest]:
    return [replace(request, num_speculative_tokens=0) for request in requests]
