"""Measures a finished checkpoint folder and its drafts on held-out prompts; writes one JSON file.

Texts that the target wrote are kept beside the report, since a draft does not change them.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_backend.checkpoint.presets import DraftKind
from kimi_backend.config.draft_config import DraftOverrides
from kimi_backend.text.tokenizer import Tokenizer, load_tokenizer
from kimi_nano.acceptance import RULES, Acceptance, Trajectories, drop_in_errors, measure, record
from kimi_nano.dataset import load_held_out
from kimi_nano.drafts import NanoDraft
from kimi_nano.export import DRAFT_FOLDERS, read_draft, read_target
from kimi_nano.generate import generate
from kimi_nano.pace import write_json
from kimi_nano.prompts import Prompt
from kimi_nano.target import NanoTarget
from kimi_nano.text_measures import distinct_4gram_share, gzip_nats_per_byte, is_looping, lookup_acceptance
from kimi_nano.train_target import held_out_loss

NUM_NEW_TOKENS = 128
NUM_DRAFT_TOKENS = 3
TEMPERATURES = (0.0, 1.0)
GENERATION_BATCH = 50
NUM_SAMPLES = 3
SAMPLE_TEMPERATURE = 0.6


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The models, tokens and options of an evaluation."""

    target: NanoTarget
    tokenizer: Tokenizer
    folder: Path
    prompts: Sequence[Prompt]
    held_out: dict[str, list[int]]
    started: float

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.started:6.1f} s] {text}", flush=True)


def evaluate(
    folder: Path, data: Path, report: Path, *, num_prompts: int, num_files: int, device: torch.device
) -> dict[str, Any]:
    """Measure everything and write `report`.

    Args:
        folder: a target's checkpoint with drafts in folders below it.
        data: what `dataset.prepare` wrote.
        num_prompts: how many of its prompts to use, from the first on.
        num_files: how many of its held-out files the loss is measured on.
    """
    files, prompts = load_held_out(data)
    prompts = prompts[:num_prompts]
    target = read_target(folder).to(device)
    held_out = dict(list(files.items())[:num_files])
    work = Evaluation(target, load_tokenizer(folder), folder, prompts, held_out, time.perf_counter())
    result: dict[str, Any] = {"num_prompts": len(prompts), "num_draft_tokens": NUM_DRAFT_TOKENS}
    texts = {temperature: _texts(work, temperature, report) for temperature in TEMPERATURES}
    result["text"] = {str(temperature): _text_measures(work, written) for temperature, written in texts.items()}
    result["samples"] = _samples(work)
    result["held_out"] = _held_out(work)
    write_json(report, result)
    result["drafts"] = _drafts(work, texts)
    write_json(report, result)
    return result


def _texts(work: Evaluation, temperature: float, report: Path) -> Tensor:
    """[prompts, NUM_NEW_TOKENS]: written now, or read back if the same was written before."""
    kept = report.with_name(f"{report.stem}-texts-{temperature:g}-{len(work.prompts)}.json")
    if kept.exists():
        return torch.tensor(json.loads(kept.read_text()))
    device = work.target.device
    written = []
    for start in range(0, len(work.prompts), GENERATION_BATCH):
        batch = [prompt.token_ids for prompt in work.prompts[start : start + GENERATION_BATCH]]
        seeds = torch.arange(start, start + len(batch), device=device)
        temperatures = torch.full((len(batch),), temperature, device=device)
        written += generate(work.target, batch, NUM_NEW_TOKENS, temperatures, seeds, torch.float32).tolist()
        work.say(f"temperature {temperature:g}: {len(written)} of {len(work.prompts)} texts written")
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(written))
    return torch.tensor(written)


def _text_measures(work: Evaluation, written: Tensor) -> dict[str, Any]:
    shares = torch.tensor([distinct_4gram_share(ids) for ids in written.tolist()])
    loops = is_looping(written)
    prompts = [prompt.token_ids for prompt in work.prompts]
    lookup = {"lookup": lookup_acceptance(prompts, written, NUM_DRAFT_TOKENS)}
    return {
        "distinct_4gram_share": float(shares.mean()),
        "distinct_4gram_share_not_looping": float(shares[~loops].mean()) if not loops.all() else None,
        "looping_prompts": int(loops.sum()),
        "prompt_lookup": _by_looping(lookup, loops)["lookup"],
    }


def _samples(work: Evaluation) -> list[dict[str, str]]:
    chosen, device = work.prompts[:NUM_SAMPLES], work.target.device
    temperatures = torch.full((len(chosen),), SAMPLE_TEMPERATURE, device=device)
    seeds = torch.arange(len(chosen), device=device)
    prompts = [prompt.token_ids for prompt in chosen]
    written = generate(work.target, prompts, NUM_NEW_TOKENS, temperatures, seeds, torch.float32)
    return [
        {
            "file": prompt.key,
            "temperature": f"{SAMPLE_TEMPERATURE:g}",
            "prompt_end": work.tokenizer.decode(prompt.token_ids[-64:]),
            "continuation": work.tokenizer.decode(ids),
        }
        for prompt, ids in zip(chosen, written.tolist(), strict=True)
    ]


def _held_out(work: Evaluation) -> dict[str, float]:
    sequences = list(work.held_out.values())
    nats = held_out_loss(work.target, sequences, torch.float32)
    texts = [b"".join(work.tokenizer.token_bytes(i) for i in ids) for ids in sequences]
    num_tokens, num_bytes = sum(map(len, sequences)), sum(map(len, texts))
    alone, together = gzip_nats_per_byte(texts)
    work.say(f"held-out loss {nats:.4f} nats a token")
    return {
        "files": len(sequences),
        "tokens": num_tokens,
        "bytes": num_bytes,
        "nats_per_token": nats,
        # The first token of a file has no prediction: it is charged as a uniform guess.
        "nats_per_byte": (nats * (num_tokens - len(texts)) + len(texts) * math.log(work.tokenizer.vocab_size))
        / num_bytes,
        "gzip_nats_per_byte_each_file": alone,
        "gzip_nats_per_byte_one_stream": together,
    }


def _drafts(work: Evaluation, texts: dict[float, Tensor]) -> dict[str, Any]:
    kinds = [kind for kind, name in DRAFT_FOLDERS.items() if (work.folder / name).is_dir()]
    drafts = {kind: _read(work, kind) for kind in kinds}
    if not drafts:
        return {}
    ids = {j for draft in drafts.values() for j in draft.config.aux_layer_ids}
    ids |= {j + 1 for j in ids}  # for the wrong offset
    result: dict[str, Any] = {kind.value: {} for kind in kinds}
    device = work.target.device
    for temperature, written in texts.items():
        prompts = [prompt.token_ids for prompt in work.prompts]
        seeds = torch.arange(len(prompts), device=device)
        recorded = record(work.target, prompts, written.to(device), temperature, seeds, sorted(ids))
        rules = RULES if temperature else ("greedy",)
        for kind, draft in drafts.items():
            measured = measure(work.target, draft, recorded, NUM_DRAFT_TOKENS, rules)
            name = f"temperature {temperature:g}"
            result[kind.value][name] = _by_looping(measured, is_looping(written))
            work.say(f"{kind.value}, {name}: " + ", ".join(f"{r} {a.length:.3f}" for r, a in measured.items()))
            if not temperature:
                result[kind.value]["wrong settings"] = _wrong(work, kind, recorded, measured["greedy"])
    return result


def _by_looping(measured: dict[str, Acceptance], loops: Tensor) -> dict[str, Any]:
    """Each rule on all texts, and on those that loop and those that do not, where there are both."""
    result = {}
    for rule, acceptance in measured.items():
        result[rule] = _numbers(acceptance)
        for name, chosen in (("not looping", ~loops), ("looping", loops)):
            if 1 < int(chosen.sum()) < len(loops):
                result[rule][name] = {**_numbers(acceptance.of(chosen)), "num_texts": int(chosen.sum())}
    return result


def _wrong(work: Evaluation, kind: DraftKind, texts: Trajectories, right: Acceptance) -> dict[str, Any]:
    """Acceptance with one setting wrong at a time, greedy."""
    config = _read(work, kind).config
    shifted = tuple(j + 1 for j in config.aux_layer_ids)
    swapped = config.aux_layer_ids[::-1]
    variants = {
        "aux layers shifted by one": (DraftOverrides(), shifted),
        "fc chunks swapped": (DraftOverrides(), swapped),
        "rope pairs laid out the other way": (DraftOverrides(interleaved=not config.rope.interleaved), None),
        "feedback normed the other way": (DraftOverrides(norm_output=not config.norm_output), None),
    }
    if config.fc_norm:
        variants["fc_norm missing"] = (DraftOverrides(fc_norm=False), None)
    result = {}
    for name, (overrides, ids) in variants.items():
        draft = _read(work, kind, overrides)
        wrong = measure(work.target, draft, texts, NUM_DRAFT_TOKENS, ("greedy",), aux_layer_ids=ids)["greedy"]
        errors = drop_in_errors(right, wrong)
        result[name] = {**_numbers(wrong), "standard_errors_below": errors}
        work.say(f"{kind.value}, {name}: {wrong.length:.3f}, {errors:.1f} standard errors below")
    return result


def _read(work: Evaluation, kind: DraftKind, overrides: DraftOverrides | None = None) -> NanoDraft:
    folder = work.folder / DRAFT_FOLDERS[kind]
    return read_draft(folder, work.target.config, overrides or DraftOverrides()).to(work.target.device)


def _numbers(acceptance: Acceptance) -> dict[str, Any]:
    return {
        "acceptance_length": acceptance.length,
        "standard_error": acceptance.standard_error,
        "per_position": acceptance.per_position,
    }
