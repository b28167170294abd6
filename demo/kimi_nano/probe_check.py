"""Checks `kimi probe` on trained drafts: on copies whose config.json says one thing wrong."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kimi_backend.checkpoint.loading import DraftCheckpoint, TargetCheckpoint
from kimi_backend.config.aux_layers import AUX_LAYER_IDS_FIELD, ENCODING_FIELD
from kimi_backend.config.draft_config import DraftOverrides, Eagle3DraftConfig
from kimi_backend.config.settings import ServingSettings
from kimi_backend.runners.probe import ProbeResult, verdict
from kimi_backend.runners.probe_loading import open_probe
from kimi_nano.export import DRAFT_FOLDERS

NUM_NEW_TOKENS = 96
NUM_DRAFT_TOKENS = 3


def check_probe(folder: Path, prompts: Sequence[Sequence[int]]) -> dict[str, list[dict[str, Any]]]:
    """By kind of draft, one row for its file as it is and one for each false statement.

    Args:
        folder: a target's checkpoint with drafts in folders below it.
    """
    result: dict[str, list[dict[str, Any]]] = {}
    for kind, name in DRAFT_FOLDERS.items():
        if not (folder / name).is_dir():
            continue
        truth = DraftCheckpoint.open(folder / name, TargetCheckpoint.open(folder).config).config
        rows = [_row(folder, folder / name, "nothing", truth, prompts)]
        for statement, changes in false_statements(truth).items():
            with tempfile.TemporaryDirectory() as place:
                copy = misdeclared(folder / name, Path(place) / "draft", changes)
                rows.append(_row(folder, copy, statement, truth, prompts))
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


def _row(
    target: Path, draft: Path, statement: str, truth: Eagle3DraftConfig, prompts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    settings = ServingSettings(checkpoint=str(target), draft=str(draft), device="cpu")
    opened = open_probe(settings, max(map(len, prompts)) + NUM_NEW_TOKENS + NUM_DRAFT_TOKENS)
    results = list(opened.run(opened.write_texts(prompts, NUM_NEW_TOKENS), NUM_DRAFT_TOKENS))
    chosen, rivals = verdict(results)
    own = next(result for result in results if result.setting.is_files_own)
    return {
        "false statement": statement,
        "file's acceptance length": own.acceptance_length,
        "chosen acceptance length": chosen.acceptance_length,
        "standard errors": chosen.errors_above(own),
        "chosen": chosen.setting.name,
        "is the truth": _read_with(draft, target, chosen) == truth,
        "not told apart": [rival.setting.name for rival in rivals],
    }


def _read_with(draft: Path, target: Path, chosen: ProbeResult) -> Eagle3DraftConfig:
    overrides: DraftOverrides = chosen.setting.overrides
    config: Eagle3DraftConfig = DraftCheckpoint.open(draft, TargetCheckpoint.open(target).config, overrides).config
    return config
