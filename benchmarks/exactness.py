"""Does speculation change a token? Three measurements on one model and its held-out prompts.

    python -m kimi_nano prompts DATA prompts.jsonl
    python benchmarks/exactness.py --checkpoint demo/kimi-nano --prompts prompts.jsonl [--json OUT] [--only a b c]

a   float32, plain kernels: texts for every k, greedy and at temperature 1, must be those of k = 0. These kernels
    launch thousands of operations a step, so each case and shard of the prompts is a process's, side by side; a
    shard is one batch.
b   bf16, Triton-language kernels, teacher-forced: the k = 0 text is fed again as verify windows. Positions that draw
    another token are listed with the gap of their two best scores (log p + noise) and the smallest gap of a router;
    either must be within the rounding that is seen where the tokens agree.
c   bf16, Triton-language kernels, free-running: share of texts that are the same to the last token. One rounding
    difference changes the rest of a text, so this has no bar.
"""

import argparse
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch

from exactness_suite.compare import compare
from exactness_suite.free_running import Text, first_difference, num_identical, run_alone, texts
from exactness_suite.teacher_forced import ForcedTarget, Pass
from kimi_backend.cli.prompt_file import read_prompt_token_ids
from kimi_backend.config.settings import ServingSettings
from kimi_backend.runners.load.loading import load_pair
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS
from kimi_kernels.kernel_set import KernelSet

TEMPERATURES = (0.0, 1.0)
BARS = {0.0: 0.995, 1.0: 0.985}
FORCED_BATCH = 32
"""Sequences of a teacher-forced step."""
FORCED_WINDOWS = (4, 8)

Report = dict[str, Any]
Case = tuple[float, int]
"""Temperature and k."""


def settings_of(args: argparse.Namespace, kernels: str, batch: int) -> ServingSettings:
    """Room for `batch` sequences of the longest prompt at once."""
    longest = max(map(len, args.token_ids)) + args.num_tokens + MAX_SPECULATIVE_TOKENS + 1
    return ServingSettings(
        checkpoint=str(args.checkpoint.resolve()),
        draft=str((args.draft or args.checkpoint / "draft").resolve()),
        device=args.device,
        kernels=kernels,
        speculation_policy="fixed",
        max_model_len=longest,
        max_num_seqs=batch,
        kv_tokens=longest * batch * 2,
    )


def float32(args: argparse.Namespace) -> Report:
    """Measurement a."""
    settings = settings_of(args, "plain", args.shard)
    cases = _cases(args)
    found: dict[Case, dict[int, Text]] = {case: {} for case in cases}
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        parts: dict[Future[list[Text]], tuple[Case, list[int]]] = {}
        # All cases of a shard before the next shard, so that a run that is cut off has whole comparisons.
        shards = range(0, len(args.token_ids), args.shard)
        for first, ((temperature, k), indices) in itertools.product(shards, cases.items()):
            ours = [i for i in indices if first <= i < first + args.shard]
            if ours:
                prompts = [args.token_ids[i] for i in ours]
                part = pool.submit(run_alone, settings, prompts, ours, k, temperature, args.num_tokens)
                parts[part] = ((temperature, k), ours)
        for part in as_completed(parts):
            case, ours = parts[part]
            found[case].update(zip(ours, part.result(), strict=True))
            print(f"a T={case[0]:g} k={case[1]}: {len(ours)} texts", flush=True)
            if args.texts:
                with args.texts.open("a") as file:
                    file.writelines(json.dumps([*case, i, found[case][i]]) + "\n" for i in ours)
            args.save("a", _float32_report(cases, found, args.rotate))
    report = _float32_report(cases, found, args.rotate)
    print("a", json.dumps(report))
    return report


def _float32_report(
    cases: Mapping[Case, Sequence[int]], found: Mapping[Case, Mapping[int, Text]], is_rotated: bool
) -> Report:
    """Report on the texts that there are with speculation and without."""
    report: Report = {"prompts_at_each_k": "one k each" if is_rotated else "all"}
    for (temperature, k), indices in sorted(cases.items()):
        plain, speculated = found[temperature, 0], found[temperature, k]
        ours = [i for i in indices if i in plain and i in speculated]
        same = num_identical([plain[i] for i in ours], [speculated[i] for i in ours])
        report.setdefault(f"T={temperature:g}", {})[f"k={k}"] = {"texts": len(ours), "identical": same}
    return report


def _cases(args: argparse.Namespace) -> dict[Case, list[int]]:
    """(temperature, k) -> prompts, those that take longest first."""
    everyone = list(range(len(args.token_ids)))
    speculating = [k for k in args.k if k]
    cases: dict[Case, list[int]] = {}
    for k in sorted(args.k, reverse=True):
        for number, temperature in enumerate(TEMPERATURES):
            ours = [i for i in everyone if speculating[(i + number) % len(speculating)] == k]
            cases[temperature, k] = ours if args.rotate and k else everyone
    return cases


def teacher_forced(args: argparse.Namespace) -> Report:
    """Measurement b."""
    on_gpu = args.device == "cuda"
    kernels, dtype = (KernelSet.triton(), torch.bfloat16) if on_gpu else (KernelSet.plain(), torch.float32)
    longest = max(map(len, args.token_ids)) + args.num_tokens + MAX_SPECULATIVE_TOKENS + 1
    target = ForcedTarget(args.checkpoint.resolve(), kernels, dtype, args.device, longest)
    report: Report = {}
    for temperature in TEMPERATURES:
        plain = _in_batches(target, args, temperature, 1, None)
        for window in FORCED_WINDOWS:
            result = compare(plain, _in_batches(target, args, temperature, window, plain))
            result["bar"] = BARS[temperature]
            report[f"T={temperature:g} window={window}"] = result
            brief = {name: value for name, value in result.items() if name != "differences"}
            print("b", f"T={temperature:g} window={window}", json.dumps(brief), flush=True)
            args.save("b", report)
    return report


def _in_batches(
    target: ForcedTarget, args: argparse.Namespace, temperature: float, window: int, text: Pass | None
) -> Pass:
    passes = []
    for first in range(0, len(args.token_ids), FORCED_BATCH):
        part = slice(first, first + FORCED_BATCH)
        of_part = text and Pass(text.token_ids[part], text.score_gaps[part], text.router_gaps[part])
        passes.append(target.run(args.token_ids[part], temperature, args.num_tokens, window, of_part))
    names = ("token_ids", "score_gaps", "router_gaps")
    return Pass(*(np.concatenate([getattr(p, name) for p in passes]) for name in names))


def free_running(args: argparse.Namespace) -> Report:
    """Measurement c."""
    settings = settings_of(args, "triton" if args.device == "cuda" else "auto", args.batch)
    target, draft = load_pair(settings)
    report: Report = {}
    for temperature in TEMPERATURES:
        plain: list[Text] = []
        for k in args.k:
            seeds = range(len(args.token_ids))
            found, length = texts(target, draft, settings, args.token_ids, k, temperature, args.num_tokens, seeds)
            plain = plain or found
            row = _free_row(plain, found)
            row["acceptance_length"] = length
            report.setdefault(f"T={temperature:g}", {})[f"k={k}"] = row
            print("c", f"T={temperature:g} k={k}", json.dumps(row), flush=True)
            args.save("c", report)
    return report


def _free_row(plain: Sequence[Text], found: Sequence[Text]) -> Report:
    first = [first_difference(a, b) for a, b in zip(plain, found, strict=True)]
    kept = sum(len(text) if i is None else i for text, i in zip(plain, first, strict=True))
    same = num_identical(plain, found)
    return {
        "texts": len(plain),
        "identical": same,
        "share": same / len(plain),
        "share_of_tokens_before_the_first_difference": kept / sum(map(len, plain)),
    }


MEASUREMENTS = {"a": float32, "b": teacher_forced, "c": free_running}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--draft", type=Path, help="default: the checkpoint's folder draft")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines, as `kimi bench` takes them")
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=64, help="sequences of a step, for c")
    parser.add_argument("--k", type=int, nargs="+", default=list(range(MAX_SPECULATIVE_TOKENS + 1)))
    parser.add_argument("--processes", type=int, default=12, help="of measurement a, at most")
    parser.add_argument("--shard", type=int, default=100, help="prompts of a batch of measurement a")
    parser.add_argument(
        "--rotate", action="store_true", help="measurement a: each prompt at k = 0 and at one other k, in turn"
    )
    parser.add_argument("--prompt-tokens", type=int, default=256, help="what is kept of a prompt, from its end")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--only", nargs="+", default=list(MEASUREMENTS), choices=list(MEASUREMENTS))
    parser.add_argument("--texts", type=Path, help="JSON lines of measurement a's texts: temperature, k, prompt, ids")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.k[0] != 0:
        parser.error(f"--k {args.k}: 0 first, the others are compared with it")
    tokenizer = load_tokenizer(args.checkpoint)
    prompts = read_prompt_token_ids(args.prompts, tokenizer)[: args.num_prompts]
    args.token_ids = [prompt[-args.prompt_tokens :] for prompt in prompts]
    card = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    report: Report = {
        "command": sys.argv,
        "device": card,
        "prompts": len(args.token_ids),
        "longest_prompt": max(map(len, args.token_ids)),
        "num_tokens": args.num_tokens,
    }

    def save(name: str, found: Report) -> None:
        """Save as soon as there is a part of a measurement, so that an interrupted run leaves what it has."""
        report[name] = found
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")

    args.save = save
    for name in args.only:
        start = time.perf_counter()
        save(name, MEASUREMENTS[name](args))
        print(name, f"took {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
