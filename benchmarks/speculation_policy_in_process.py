"""Does the adaptive choice of k ever lose? As `speculation_policy.py`, in one process without a server: for a GPU.

    python benchmarks/speculation_policy_in_process.py [--device cuda] [--streams 1 4 16] [--repeats 3] [--json OUT]
    python benchmarks/speculation_policy_in_process.py --slice 5 --acceptance 3.0 --temperatures 1

The second measures a slice of Kimi-K2.5 at full width with so many layers: weights are random, routing is uniform, and
draft tokens are accepted at random with this mean length of a round.

One pair of models, and an engine for each way of serving that takes its turn with them: without a draft, with as many
draft tokens as each request asks for, and with as many as the policy chooses.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kimi_backend.checkpoint.presets import Preset, vocab_size
from kimi_backend.config.settings import ServingSettings
from kimi_backend.engine.engine import Engine
from kimi_backend.processes import freeze_what_is_loaded
from kimi_backend.runners.load.loading import load_pair
from kimi_backend.serving.spec_ensemble_server import scheduler_settings
from kimi_backend.spec_decode.policy import PolicyName
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_backend.types.request import GenerateRequest, SamplingParams, TokenDelta
from serving_suite.policy_rows import MOST_DRAFT_TOKENS, measure, table, verdict
from serving_suite.side_by_side import PROMPTS, add_common_options, provenance
from slice_suite.configs import write_slice

READY_TIMEOUT_S = 60.0
NUM_LENGTHS = 16
"""Different numbers of tokens that requests have."""
SLICE_PROMPT_LEN = 128


@dataclass(slots=True)
class EngineCase:
    """One engine and what its turns measured."""

    name: str
    engine: Engine
    k: int
    prompts: list[tuple[int, ...]]
    rates: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """Token ids of the last turn, as text, by number of the request."""
    verifies: list[int] = field(default_factory=lambda: [0] * (MOST_DRAFT_TOKENS + 1))

    def run(self, temperature: float, streams: int, num_requests: int, max_tokens: int) -> None:
        """One slice: so many requests, `streams` of them at a time."""
        room, ended = threading.Semaphore(streams), threading.Semaphore(0)
        token_ids: list[list[int]] = [[] for _ in range(num_requests)]

        def take(delta: TokenDelta) -> None:
            token_ids[int(delta.request_id)].extend(delta.token_ids)
            if delta.finish_reason is not None:
                assert delta.stats is not None
                for k, count in enumerate(delta.stats.num_draft_tokens_histogram):
                    self.verifies[k] += count
                room.release()
                ended.release()

        start = time.perf_counter()
        for number in range(num_requests):
            room.acquire()
            self.engine.submit(self._request(number, temperature, max_tokens), take)
        for _ in range(num_requests):
            ended.acquire()
        self.rates.append(sum(map(len, token_ids)) / (time.perf_counter() - start))
        self.texts = [str(ids) for ids in token_ids]

    def _request(self, number: int, temperature: float, max_tokens: int) -> GenerateRequest:
        # 7 and 16 have no common divisor: neighbours differ much, and each length is as frequent.
        length = max_tokens // 2 + max_tokens * (7 * number % NUM_LENGTHS) // NUM_LENGTHS
        return GenerateRequest(
            request_id=str(number),
            prompt_token_ids=self.prompts[number % len(self.prompts)],
            sampling=SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, seed=number),
            num_speculative_tokens=self.k,
        )


def serving_settings(args: argparse.Namespace, folder: Path) -> ServingSettings:
    """folder: where the slice's configs are to lie, if it is one."""
    settings = ServingSettings(
        checkpoint=str(args.checkpoint),
        draft=str(args.draft),
        device=args.device,
        max_model_len=1024,
        max_num_seqs=max(args.streams),
        max_speculative_tokens=MOST_DRAFT_TOKENS,
        capture_batch_sizes=",".join(map(str, args.streams)),
    )
    if not args.slice:
        return settings
    target, draft = write_slice(folder, args.slice, args.preset)
    return replace(
        settings,
        checkpoint=str(target),
        draft=str(draft),
        load_format="dummy",
        routing="uniform",
        synthetic_acceptance=args.acceptance,
        kv_tokens=max(args.streams) * settings.max_model_len,
    )


def make_prompts(args: argparse.Namespace, settings: ServingSettings) -> list[tuple[int, ...]]:
    """Beginnings of programs, or of a slice random tokens."""
    if args.slice:
        rng, size = np.random.default_rng(0), vocab_size(args.preset)
        return [tuple(rng.integers(size // 2, size - size // 8, SLICE_PROMPT_LEN).tolist()) for _ in PROMPTS]
    tokenizer = load_tokenizer(settings.checkpoint)
    return [tuple(tokenizer.encode(prompt)) for prompt in PROMPTS]


def start_engines(stack: ExitStack, settings: ServingSettings) -> dict[str, Engine]:
    """Without a draft, fixed, adaptive. No prefix cache: what one engine left in the blocks another overwrites."""
    target, draft = load_pair(settings)
    assert draft is not None
    tokenizer = load_tokenizer(settings.checkpoint)
    engines = {}
    for name in ("plain", "fixed", "adaptive"):
        policy = PolicyName.ADAPTIVE if name == "adaptive" else PolicyName.FIXED
        own = replace(scheduler_settings(settings), speculation_policy=policy, enable_prefix_cache=False)
        engines[name] = Engine(
            target,
            None if name == "plain" else draft,
            settings=own,
            eos_token_ids=tokenizer.eos_token_ids,
            tokenizer=tokenizer,
        )
        engines[name].start()
        stack.callback(engines[name].stop)
        engines[name].wait_until_ready(READY_TIMEOUT_S)
    return engines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--slice", type=int, default=0, metavar="LAYERS", help="one dense layer included; 0: kimi-nano")
    parser.add_argument("--preset", type=Preset, default=Preset.KIMI_K25, help="of the slice; tiny runs on a CPU")
    parser.add_argument("--acceptance", type=float, default=3.0, help="of the slice: mean tokens a round and sequence")
    parser.set_defaults(max_tokens=512)
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with ExitStack() as stack:
        settings = serving_settings(args, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        prompts = make_prompts(args, settings)
        engines = start_engines(stack, settings)
        freeze_what_is_loaded()  # as servers do: one look of the garbage collector takes a quarter of a second
        for temperature in args.temperatures:
            for streams in args.streams:
                cases = [
                    EngineCase("no draft", engines["plain"], 0, prompts),
                    *(EngineCase(f"k = {k}", engines["fixed"], k, prompts) for k in args.k),
                    EngineCase("adaptive", engines["adaptive"], MOST_DRAFT_TOKENS, prompts),
                ]
                runs.append(measure(cases, temperature, streams, args))
                print(json.dumps(runs[-1]), file=sys.stderr)
    print(table(runs) + "\n\n" + verdict(runs))
    if args.json:
        args.json.write_text(json.dumps({**provenance(), "runs": runs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
