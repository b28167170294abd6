"""Engine-thread time a step, over models that answer at once: what the engine adds to every round.

    python benchmarks/engine_overhead.py [--json] [--sequences 1,16,64,256] [--steps N] [--wait-ms 2] [--penalties]

Two spans are reported, each as median and 90th percentile over steps in steady decoding:

- draft reply → next target request: keep the proposals, publish, take cancellations, schedule, build the plan
- target reply → draft request: append tokens, stop checks, hand over to the emitter, build the plan

The emitter thread runs as in service, token ids only. Each model call sleeps --wait-ms, which lets go of the
interpreter as a real call does; with 0 the emitter has no time of its own and its work shows up in both spans.
Random acceptance, k = 3.
"""

import argparse
import json
import statistics
import threading
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

import numpy as np

from kimi_backend.engine.engine import Engine
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.plan import (
    AuxHandle,
    DraftPlan,
    DraftReply,
    RunnerDescription,
    TargetPlan,
    TargetReply,
)
from kimi_backend.types.request import GenerateRequest, SamplingParams, TokenDelta

VOCAB_SIZE = 163_840
BLOCK_SIZE = 64
MAX_MODEL_LEN = 32_768


def describe(role: str, num_sequences: int, vocab_size: int) -> RunnerDescription:
    return RunnerDescription(
        role=role,
        runner_epoch=1,
        block_size=BLOCK_SIZE,
        num_blocks=num_sequences * 80 + MAX_MODEL_LEN // BLOCK_SIZE,
        max_num_batched_tokens=8192,
        max_num_seqs=max(num_sequences, 1),
        max_model_len=MAX_MODEL_LEN,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size if role == "draft" else None,
        aux_layer_ids=(2, 30, 58),
        hidden_size=7168,
        kv_cache_dtype="bf16",
        device="cpu",
    )


@dataclass(frozen=True, slots=True)
class Answered:
    """A step whose reply is there."""

    reply: Any

    def wait(self) -> Any:
        return self.reply


class InstantTarget:
    """Answers from prepared random numbers; notes when it is asked and when it has answered."""

    depth = 0

    def __init__(self, num_sequences: int, wait_s: float, vocab_size: int = VOCAB_SIZE) -> None:
        self.wait_s = wait_s
        self.description = describe("target", num_sequences, vocab_size)
        self.random = np.random.default_rng(0)
        self.asked_s: list[float] = []
        self.answered_s: list[float] = []
        self.num_decoding: list[int] = []

    def describe(self) -> RunnerDescription:
        return self.description

    def launch(self, plan: TargetPlan) -> Answered:
        self.asked_s.append(perf_counter())
        reply = self.answer(plan)
        sleep(self.wait_s)
        self.answered_s.append(perf_counter())
        return Answered(reply)

    def answer(self, plan: TargetPlan) -> TargetReply:
        """Answer at random, at once."""
        counts = plan.num_sampled_rows[plan.num_sampled_rows > 0]
        num_drafts = counts - 1
        width = int(num_drafts.max(initial=0)) + 1
        self.num_decoding.append(int((num_drafts > 0).sum()))
        return TargetReply(
            step_id=plan.step_id,
            runner_epoch=1,
            seq_status=np.zeros(len(plan.rows.query_lens), np.int32),
            output_token_ids=self.random.integers(1000, self.description.vocab_size, (len(counts), width)),
            num_accepted_tokens=(self.random.random(len(counts)) * (num_drafts + 1)).astype(np.int32),
            aux=AuxHandle(),
        )


class InstantDraft:
    """Proposes at random, at once."""

    depth = 0

    def __init__(self, num_sequences: int, wait_s: float, vocab_size: int = VOCAB_SIZE) -> None:
        self.wait_s = wait_s
        self.description = describe("draft", num_sequences, vocab_size)
        self.random = np.random.default_rng(1)
        self.asked_s: list[float] = []
        self.answered_s: list[float] = []

    def describe(self) -> RunnerDescription:
        return self.description

    def launch(self, plan: DraftPlan) -> Answered:
        self.asked_s.append(perf_counter())
        reply = self.answer(plan)
        sleep(self.wait_s)
        self.answered_s.append(perf_counter())
        return Answered(reply)

    def answer(self, plan: DraftPlan) -> DraftReply:
        """Answer at random, at once."""
        shape = (int((plan.num_proposals > 0).sum()), int(plan.num_proposals.max(initial=0)))
        return DraftReply(
            step_id=plan.step_id,
            runner_epoch=1,
            seq_status=np.zeros(len(plan.num_proposals), np.int32),
            draft_token_ids=self.random.integers(1000, self.description.vocab_size, shape),
        )


def measure(num_sequences: int, num_steps: int, wait_s: float, penalties: bool) -> dict[str, float]:
    """Both spans in ms for so many sequences in steady decoding."""
    target, draft = InstantTarget(num_sequences, wait_s), InstantDraft(num_sequences, wait_s)
    settings = SchedulerSettings(
        max_num_seqs=num_sequences, max_num_batched_tokens=8192, max_queue_size=max(1024, num_sequences)
    )
    engine = Engine(target, draft, settings=settings, eos_token_ids=(1, 2))
    engine.start()
    engine.wait_until_ready(10)
    done = threading.Semaphore(0)

    def sink(delta: TokenDelta) -> None:
        if delta.finish_reason is not None:
            done.release()

    rng = np.random.default_rng(2)
    sampling = SamplingParams(
        temperature=0.7,
        top_p=0.95,
        max_tokens=min(4 * num_steps, 4000),
        presence_penalty=0.5 if penalties else 0.0,
    )
    for index in range(num_sequences):
        prompt = tuple(rng.integers(1000, VOCAB_SIZE, 500).tolist())
        engine.submit(GenerateRequest(request_id=str(index), prompt_token_ids=prompt, sampling=sampling), sink)
    for _ in range(num_sequences):
        done.acquire()
    engine.stop()
    return _spans(target, draft, num_sequences, num_steps)


def _spans(target: InstantTarget, draft: InstantDraft, num_sequences: int, num_steps: int) -> dict[str, float]:
    """Times over steps that all sequences decode in, the first ten left out."""
    steady = [i for i, count in enumerate(target.num_decoding) if count == num_sequences][10 : 10 + num_steps]
    after_draft, after_target = [], []
    for step in steady:
        # Steps without a draft call do not occur while everybody decodes, so call i of both belongs to step i.
        if step + 1 < len(target.asked_s) and step < len(draft.asked_s):
            after_target.append(1e3 * (draft.asked_s[step] - target.answered_s[step]))
            after_draft.append(1e3 * (target.asked_s[step + 1] - draft.answered_s[step]))
    return {
        "sequences": num_sequences,
        "steps": len(after_draft),
        "draft_reply_to_target_request_ms_median": statistics.median(after_draft),
        "draft_reply_to_target_request_ms_p90": statistics.quantiles(after_draft, n=10)[-1],
        "target_reply_to_draft_request_ms_median": statistics.median(after_target),
        "target_reply_to_draft_request_ms_p90": statistics.quantiles(after_target, n=10)[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", default="1,16,64,256")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--wait-ms", type=float, default=2.0, help="how long each model call takes")
    parser.add_argument("--penalties", action="store_true", help="every request uses a presence penalty")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for count in map(int, arguments.sequences.split(",")):
        result = measure(count, arguments.steps, arguments.wait_ms / 1e3, arguments.penalties)
        if arguments.json:
            print(json.dumps(result))
        else:
            print(
                f"{count:4d} sequences, {result['steps']} steps:"
                f" draft reply -> target request {result['draft_reply_to_target_request_ms_median']:.3f} ms"
                f" (p90 {result['draft_reply_to_target_request_ms_p90']:.3f}),"
                f" target reply -> draft request {result['target_reply_to_draft_request_ms_median']:.3f} ms"
                f" (p90 {result['target_reply_to_draft_request_ms_p90']:.3f})"
            )


if __name__ == "__main__":
    main()
