"""The whole training: target, rounding, text of its own, drafts. Saves after each stage what it has."""

import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kimi_backend.checkpoint.presets import DraftKind
from kimi_backend.config.draft_config import Eagle3MlaDraftConfig
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_nano.aligned_start import align
from kimi_nano.dataset import Windows, load
from kimi_nano.export import (
    DRAFT_FOLDERS,
    TARGET_FOLDER,
    bake,
    read_draft,
    read_target,
    unbake,
    write_draft,
    write_target,
)
from kimi_nano.generate import generate
from kimi_nano.grow import grow
from kimi_nano.pace import write_json
from kimi_nano.recipe import Recipe, Run
from kimi_nano.sharpen import sharpen_file
from kimi_nano.target import NanoTarget
from kimi_nano.train_drafts import Drafts, TextByTemperature, draft_batches, make_drafts, train_drafts
from kimi_nano.train_target import held_out_loss, train_target
from kimi_nano.unloop import unloop

READ_FOLDER = "kimi-nano-read"
"""The target before it is trained against its loops: what `unloop --teacher` takes."""
ALIGNED_WINDOWS = 32
WATCHED_FILES = 48
"""Held-out files whose loss is measured while training."""
GENERATION_BATCH = 2048


def train(
    data: Path,
    out: Path,
    run: Run,
    *,
    device: torch.device,
    compiles: bool,
    grow_from: Path | None = None,
    pack_to: Path | None = None,
) -> None:
    """Train everything that `run` names and write checkpoints, curves and a log of the run into `out`.

    Args:
        data: what `dataset.prepare` wrote.
        grow_from: a trained target's folder to begin with, see `grow`; left out, the target begins with random weights.
        pack_to: also pack what there is after each stage, see `pack`.
    """
    torch.manual_seed(run.seed)
    started = time.perf_counter()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    dataset = load(data)
    corpus = Windows(dataset.train, device, run.seed)
    target = NanoTarget(run.recipe.target_config())
    if grow_from:
        grow(target, read_target(grow_from))
    target.to(device)
    if compiles:
        target.compile_layers()
    out.mkdir(parents=True, exist_ok=True)
    facts = {"device": _device_name(device), "torch": torch.__version__, "seed": run.seed, "compiled": compiles}
    facts["target_parameters"] = sum(p.numel() for p in target.parameters())
    _say(started, f"{len(dataset.train):,} training tokens, {facts['target_parameters']:,} parameters on {device}")
    watched = list(dataset.held_out.values())[:WATCHED_FILES]
    curve, losses = train_target(target, corpus, run, dtype, watched)
    write_target(out / READ_FOLDER, target, run.recipe, data / "tokenizer")
    if pack_to:
        pack(out, pack_to)
    _say(started, f"target has read; held-out nats a token: {losses}")
    rows = _unloop(target, corpus, run, dtype, data / "tokenizer")
    write_target(out / TARGET_FOLDER, target, run.recipe, data / "tokenizer")
    bake(target)
    losses["int4_after_unloop"] = held_out_loss(target, watched, dtype)
    facts |= {"target_steps": len(curve.rows) + 1, "target_seconds": curve.rows[-1]["seconds"], "losses": losses}
    record: dict[str, Any] = {"facts": facts, "target": curve.rows, "unloop": rows}
    write_json(out / "training.json", record)
    _say(started, f"target written; held-out nats a token: {losses}")
    if pack_to:
        pack(out, pack_to)
    own_text = _own_text(target, corpus, run, dtype, started)
    counts = torch.from_numpy(np.bincount(dataset.train, minlength=target.config.vocab_size))
    drafts = make_drafts(run, target, counts)
    _align(drafts, target, corpus, run, dtype)
    record |= _finish_drafts(drafts, target, corpus, own_text, run, dtype, out, compiles)
    write_json(out / "training.json", record)
    if pack_to:
        pack(out, pack_to)
    _say(started, "drafts written")


def unloop_of(
    folder: Path, data: Path, out: Path, run: Run, *, device: torch.device, teacher: Path | None = None
) -> None:
    """Train a finished target on against its loops and write it into `out`.

    Args:
        folder: the target's checkpoint.
        data: what `dataset.prepare` wrote.
        teacher: another target's checkpoint; None is the target itself.
    """
    torch.manual_seed(run.seed)
    started = time.perf_counter()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    dataset = load(data)
    target = read_target(folder).to(device)
    watched = list(dataset.held_out.values())[:WATCHED_FILES]
    before = held_out_loss(target, watched, dtype)
    if device.type == "cuda":
        target.compile_layers()
    unbake(target)
    taught_by = read_target(teacher).to(device) if teacher else None
    rows = _unloop(target, Windows(dataset.train, device, run.seed), run, dtype, data / "tokenizer", taught_by)
    losses = {"before": before}
    for quantizes, name in ((False, "float_after"), (True, "int4_after")):
        target.quantizes = quantizes
        losses[name] = held_out_loss(target, watched, dtype)
    write_target(out / TARGET_FOLDER, target, run.recipe, data / "tokenizer")
    bake(target)
    write_json(out / "unloop_training.json", {"unloop": rows, "unloop_losses": losses})
    _say(started, f"target written; held-out nats a token: {losses}")


def _unloop(
    target: NanoTarget,
    corpus: Windows,
    run: Run,
    dtype: torch.dtype,
    tokenizer: Path,
    teacher: NanoTarget | None = None,
) -> list[dict[str, float]]:
    if not run.unloop.seconds and not run.unloop.steps:
        return []
    reader = load_tokenizer(tokenizer)
    ends = [reader.token_bytes(token).endswith(b"\n") for token in range(target.config.vocab_size)]
    line_ends = torch.tensor(ends, device=target.device)
    return unloop(target, corpus, line_ends, run.unloop, run.recipe.unloop, dtype, teacher).rows


def train_drafts_of(
    folder: Path,
    data: Path,
    out: Path,
    run: Run,
    *,
    device: torch.device,
    compiles: bool = False,
    start_from: Path | None = None,
) -> None:
    """Train `run.kinds` on a finished target and write them, with their curves, into `out`.

    Args:
        folder: the target's checkpoint.
        data: what `dataset.prepare` wrote.
        start_from: a target's folder with trained drafts of the same kinds, of an earlier state of the target say.
    """
    torch.manual_seed(run.seed)
    started = time.perf_counter()
    dtype = torch.bfloat16
    train = load(data).train
    target = read_target(folder).to(device)
    corpus = Windows(train, device, run.seed)
    own_text = _own_text(target, corpus, run, dtype, started)
    counts = torch.from_numpy(np.bincount(train, minlength=target.config.vocab_size))
    drafts = make_drafts(run, target, counts)
    if start_from is None:
        _align(drafts, target, corpus, run, dtype)
    else:
        _start_from(drafts, start_from, target)
    record = _finish_drafts(drafts, target, corpus, own_text, run, dtype, out, compiles)
    write_json(out / "draft_training.json", record)
    _say(started, "drafts written")


def _finish_drafts(
    drafts: Drafts,
    target: NanoTarget,
    corpus: Windows,
    own_text: TextByTemperature,
    run: Run,
    dtype: torch.dtype,
    out: Path,
    compiles: bool,
) -> dict[str, Any]:
    """Train, write, and return what there is to record."""
    if compiles:
        if not target.is_compiled:
            target.compile_layers()
        for draft in drafts.values():
            draft.compile_step()
    batches = draft_batches(drafts, target, corpus, own_text, run, dtype)
    curves = train_drafts(drafts, target, batches, run, dtype, captures=compiles)
    for kind, draft in drafts.items():
        write_draft(out / TARGET_FOLDER / DRAFT_FOLDERS[kind], draft, kind, run.recipe)
    sharpened = sharpen_all(out / TARGET_FOLDER, tuple(drafts), target, corpus, run.recipe)
    first = next(iter(curves.values())).rows
    return {
        "drafts": {name: curve.rows for name, curve in curves.items()},
        "draft_facts": {
            "device": _device_name(target.device),
            "steps": len(first) + 1,
            "seconds": first[-1]["seconds"],
            "parameters": {kind.value: sum(p.numel() for p in draft.parameters()) for kind, draft in drafts.items()},
            "sharpened": sharpened,
        },
    }


def sharpen_all(
    folder: Path, kinds: Sequence[DraftKind], target: NanoTarget, corpus: Windows, recipe: Recipe
) -> dict[str, dict[float, float]]:
    """Sharpen finished drafts' files below `folder` in place. Returns by kind the acceptance length of each scale."""
    if not recipe.sharpen_prompts:
        return {}
    prompts = corpus.batch(recipe.sharpen_prompts, recipe.context // 8).tolist()
    result = {}
    for kind in kinds:
        lengths = sharpen_file(folder / DRAFT_FOLDERS[kind], kind, recipe, target, prompts)
        result[kind.value] = lengths
        text = ", ".join(f"{scale:g} {length:.3f}" for scale, length in lengths.items())
        print(f"draft {kind.value}, acceptance length by scale: {text}", flush=True)
    return result


def _align(drafts: Drafts, target: NanoTarget, corpus: Windows, run: Run, dtype: torch.dtype) -> None:
    for draft in drafts.values():
        if isinstance(draft.config, Eagle3MlaDraftConfig):
            align(draft, target, corpus.batch(ALIGNED_WINDOWS, run.recipe.draft_window), dtype)


def _start_from(drafts: Drafts, folder: Path, target: NanoTarget) -> None:
    for kind, draft in drafts.items():
        trained = read_draft(folder / DRAFT_FOLDERS[kind], target.config)
        draft.load_state_dict(trained.state_dict())


def _own_text(target: NanoTarget, corpus: Windows, run: Run, dtype: torch.dtype, started: float) -> TextByTemperature:
    """Windows of text that the target wrote after prompts of the corpus: what the drafts will meet at serving."""
    recipe = run.recipe
    if not recipe.generated_sequences:
        return {}
    count, device = recipe.generated_sequences, target.device
    prompts = corpus.batch(count, recipe.generated_prompt_tokens)
    temperatures = [recipe.own_temperature(i) for i in range(count)]
    seeds = torch.arange(count, device=device) + run.seed
    given = (prompts, torch.tensor(temperatures, device=device), seeds)
    chunks = zip(*(x.split(GENERATION_BATCH) for x in given), strict=True)
    written = torch.cat(
        [generate(target, prompt.tolist(), recipe.generated_tokens, t, seed, dtype) for prompt, t, seed in chunks]
    )
    texts = torch.cat((prompts, written), dim=1).cpu().numpy().astype(np.uint16)
    _say(started, f"the target wrote {written.numel():,} tokens")
    places = np.array(temperatures)
    return {t: Windows(texts[places == t].ravel(), device, run.seed + 1) for t in dict.fromkeys(temperatures)}


def pack(out: Path, to: Path) -> None:
    """One archive of each target and one of the drafts, as far as they are written; other files beside them."""
    to.mkdir(parents=True, exist_ok=True)
    folder = out / TARGET_FOLDER
    for name, source in (("read.tar", out / READ_FOLDER), ("target.tar", folder)):
        with tarfile.open(to / name, "w") as archive:
            for file in sorted(source.glob("*")):
                if file.is_file():
                    archive.add(file, f"{source.name}/{file.name}")
    with tarfile.open(to / "drafts.tar", "w") as archive:
        for name in DRAFT_FOLDERS.values():
            if (folder / name).is_dir():
                archive.add(folder / name, f"{TARGET_FOLDER}/{name}")
    for file in out.glob("*.json"):
        (to / file.name).write_bytes(file.read_bytes())


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _say(started: float, text: str) -> None:
    print(f"[{time.perf_counter() - started:6.1f} s] {text}", flush=True)
