"""Checks `kimi probe` on trained drafts: on copies whose config.json says one thing wrong.

What a setting gets accepted depends on the config it comes to and on the text, not on which false file it mends: each
config is replayed once.
"""

import json
import multiprocessing
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kimi_backend.checkpoint.loading import DraftCheckpoint, TargetCheckpoint
from kimi_backend.checkpoint.presets import DraftKind
from kimi_backend.config.aux_layers import AUX_LAYER_IDS_FIELD, ENCODING_FIELD
from kimi_backend.config.draft_config import DraftOverrides, Eagle3DraftConfig
from kimi_backend.config.settings import ServingSettings
from kimi_backend.probe.loading import OpenedProbe, open_probe
from kimi_backend.probe.probing import ProbeResult, ProbeTexts, verdict
from kimi_backend.probe.settings import ProbeSetting
from kimi_nano.export import DRAFT_FOLDERS

NUM_NEW_TOKENS = 96
NUM_DRAFT_TOKENS = 3
TRUTH = "nothing"
Prompts = Sequence[Sequence[int]]
Lengths = dict[Eagle3DraftConfig, tuple[float, ...]]
"""Acceptance length of each text by the config that the draft was read with."""


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """A draft's folder and the settings that the probe tries on it."""

    statement: str
    """The statement of its config.json that is wrong."""
    settings: tuple[ProbeSetting, ...]
    configs: tuple[Eagle3DraftConfig, ...]
    """The configs, one of each setting."""


def check_probe(
    folder: Path,
    prompts: Prompts,
    kinds: Sequence[DraftKind] = tuple(DRAFT_FOLDERS),
    *,
    num_processes: int = 1,
    num_tokens: int = NUM_NEW_TOKENS,
) -> dict[str, list[dict[str, Any]]]:
    """Rows by kind of draft: one for its file as it is and one for each false statement.

    Args:
        folder: a target's checkpoint with drafts in folders below it.
        kinds: which of them, where they are there.
        num_processes: that share the prompts; each takes one thread.
        num_tokens: that the target writes after each prompt.
    """
    result: dict[str, list[dict[str, Any]]] = {}
    shares = [prompts[start::num_processes] for start in range(min(num_processes, len(prompts)))]
    for kind in kinds:
        if not (folder / DRAFT_FOLDERS[kind]).is_dir():
            continue
        work = [(folder, kind, share, num_tokens) for share in shares]
        if len(work) == 1:
            parts = [_replayed(*work[0])]
        else:
            with multiprocessing.get_context("spawn").Pool(len(work)) as pool:
                parts = pool.starmap(_replayed, work)
        files = parts[0][0]
        lengths = {config: tuple(x for _, part in parts for x in part[config]) for config in parts[0][1]}
        rows = [_row(file, files[0].configs[0], lengths) for file in files]
        for row in rows:
            print(f"{kind.value}: {row}", flush=True)
        result[kind.value] = rows
    return result


def false_statements(truth: Eagle3DraftConfig) -> dict[str, dict[str, Any]]:
    """Fields of config.json by what is wrong with them.

    A missing `fc_norm` is none of them: a file that holds its weights and does not name it is refused.
    """
    ids = [*truth.aux_layer_ids]
    return {
        "aux layers one too high": {AUX_LAYER_IDS_FIELD: ids, ENCODING_FIELD: "output"},
        "rotary pairs the other way": {"rope_interleave": not truth.rope.interleaved},
        "norm_output the other way": {"norm_output": not truth.norm_output},
    }


def misdeclared(folder: Path, to: Path, changes: dict[str, Any]) -> Path:
    """A copy of a draft with other statements in its config.json."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    nested = config["eagle_config"]
    for field, value in changes.items():
        # A statement is changed where it stands; new ones of EAGLE go to their object.
        is_nested = field in nested or (field not in config and field != "rope_interleave")
        (nested if is_nested else config)[field] = value
    (to / "config.json").write_text(json.dumps(config))
    return to


def _replayed(folder: Path, kind: DraftKind, prompts: Prompts, num_tokens: int) -> tuple[list[CheckedFile], Lengths]:
    """The true file first, then the false ones, and what every config of theirs gets accepted on these prompts."""
    files, lengths = list[CheckedFile](), Lengths()
    with tempfile.TemporaryDirectory() as place:
        opened = _opened(folder, kind, Path(place), max(map(len, prompts)) + num_tokens + NUM_DRAFT_TOKENS)
        texts: dict[tuple[int, ...], ProbeTexts] = {}
        for statement, probe in opened.items():
            if probe.layers not in texts:
                texts[probe.layers] = probe.write_texts(prompts, num_tokens)
            configs = tuple(_config(probe, setting.overrides) for setting in probe.candidates)
            files.append(CheckedFile(statement, tuple(probe.candidates), configs))
            new = [(s, c) for s, c in zip(probe.candidates, configs, strict=True) if c not in lengths]
            results = replace(probe, candidates=[setting for setting, _ in new]).run(
                texts[probe.layers], NUM_DRAFT_TOKENS
            )
            for (_, config), result in zip(new, results, strict=True):
                lengths[config] = result.lengths
    return files, lengths


def _opened(folder: Path, kind: DraftKind, place: Path, max_model_len: int) -> dict[str, OpenedProbe]:
    """Probes by false statement; the files are written below `place`."""
    true_file = folder / DRAFT_FOLDERS[kind]
    truth = DraftCheckpoint.open(true_file, TargetCheckpoint.open(folder).config).config
    drafts = {TRUTH: true_file}
    for number, (statement, changes) in enumerate(false_statements(truth).items()):
        drafts[statement] = misdeclared(true_file, place / str(number), changes)
    return {
        statement: open_probe(
            ServingSettings(checkpoint=str(folder), draft=str(draft), device="cpu", cpu_threads=1), max_model_len
        )
        for statement, draft in drafts.items()
    }


def _config(probe: OpenedProbe, overrides: DraftOverrides) -> Eagle3DraftConfig:
    config: Eagle3DraftConfig = DraftCheckpoint.open(probe.draft.path, probe.target.config, overrides).config
    return config


def _row(file: CheckedFile, truth: Eagle3DraftConfig, lengths: Lengths) -> dict[str, Any]:
    results = [ProbeResult(setting=s, lengths=lengths[c]) for s, c in zip(file.settings, file.configs, strict=True)]
    chosen, rivals = verdict(results)
    own = next(result for result in results if result.setting.is_files_own)
    return {
        "false statement": file.statement,
        "prompts": len(own.lengths),
        "file's acceptance length": own.acceptance_length,
        "chosen acceptance length": chosen.acceptance_length,
        "standard errors": chosen.errors_above(own),
        "chosen": chosen.setting.name,
        "is the truth": file.configs[results.index(chosen)] == truth,
        "not told apart": [rival.setting.name for rival in rivals],
    }
