"""The configs of published drafts (`support/published_drafts.json`: facts of public repositories, each named there).

Each is parsed against a target of its sizes; one that is served has a tiny twin, of the same fields and smaller sizes,
whose file opens and agrees with the naive float64 draft. The others are refused for the reason that stands beside them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kimi_backend.checkpoint.loading import DraftCheckpoint
from kimi_backend.config.draft_config import Eagle3DraftConfig, Eagle3MlaDraftConfig
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.errors import ConfigError
from support.draft_steps import DraftSteps, build_draft
from support.family_configs import text_config
from support.naive_eagle3 import NaiveDraft
from support.tiny_checkpoints import random_draft
from support.tiny_configs import target_config

MAX_RELATIVE_ERROR = 1e-4
PUBLISHED = json.loads((Path(__file__).parents[2] / "support" / "published_drafts.json").read_text())
NAMES = [f"{entry['repository']} {entry['path']}" for entry in PUBLISHED]
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 96,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
    "target_hidden_size": 64,
    "original_max_position_embeddings": 64,
    "max_position_embeddings": 256,
}


def entries(*, refused: bool) -> list[Any]:
    pairs = zip(PUBLISHED, NAMES, strict=True)
    return [pytest.param(entry, id=name) for entry, name in pairs if ("refused" in entry) is refused]


def target_of(config: dict[str, Any]) -> KimiModelConfig:
    """A target with the draft's widths, and deep enough for its aux layers."""
    ids = {**config, **config.get("eagle_config", {})}.get("eagle_aux_hidden_state_layer_ids") or [61]
    sizes = {name: config[name] for name in ("hidden_size", "vocab_size")}
    return KimiModelConfig.from_hf_json(text_config(num_hidden_layers=max(61, ids[-1] + 3), **sizes))


def shrunk(value: Any, name: str = "") -> Any:
    """The same fields with the sizes of a tiny draft; as many queries to a key head, as large a part of the tokens."""
    if isinstance(value, dict):
        small = {key: shrunk(item, key) for key, item in value.items()}
        if "num_attention_heads" in value:
            heads, kv_heads = value["num_attention_heads"], value.get("num_key_value_heads", 1)
            small["num_attention_heads"], small["num_key_value_heads"] = (4, 4 * kv_heads // heads or 1)
            is_whole = value.get("draft_vocab_size", value["vocab_size"]) == value["vocab_size"]
            small["draft_vocab_size"] = 96 if is_whole else 48
        return small
    if name == "eagle_aux_hidden_state_layer_ids" and value:
        return [value[0], value[0] + 1, value[0] + 2]
    return TINY.get(name, value)


@pytest.mark.parametrize("entry", entries(refused=True))
def test_what_is_not_served_is_refused_by_name(entry: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=entry["refused"]):
        Eagle3DraftConfig.from_hf_json(entry["config"], target_of(entry["config"]))


@pytest.mark.parametrize("entry", entries(refused=False))
def test_what_is_served_is_right(entry: dict[str, Any], tmp_path: Path) -> None:
    published = Eagle3DraftConfig.from_hf_json(entry["config"], target_of(entry["config"]))
    assert not any("does not know" in warning for warning in published.warnings), published.warnings
    target = target_config(num_hidden_layers=8, max_position_embeddings=256)
    (tmp_path / "config.json").write_text(json.dumps(shrunk(entry["config"])))
    config = Eagle3DraftConfig.from_hf_json(tmp_path, target)
    is_mla = isinstance(config, Eagle3MlaDraftConfig)
    assert is_mla is isinstance(published, Eagle3MlaDraftConfig)
    # SpecForge leaves the embedding out, which is then the target's; it is put back so that the draft stands alone.
    tensors = random_draft(config, layer_prefix="midlayer.")
    save_file(tensors, tmp_path / "model.safetensors")
    opened = DraftCheckpoint.open(tmp_path, target)
    read = {name: opened.tensors.read(name) for name in opened.tensors.names()}
    draft, naive = build_draft(opened.config, read), NaiveDraft(config, tensors, "midlayer.")
    generator = torch.Generator().manual_seed(0)
    aux = 2 * torch.randn(24, 3 * 64, generator=generator)
    tokens = torch.randint(0, 96, (27,), generator=generator).tolist()
    steps = DraftSteps(draft, [32])
    logits, feedback = steps.step([(0, tokens[:24])], [draft.combine_aux(aux)])
    naive_rows = [naive.row(naive.fuse(aux[row]), tokens[row]) for row in range(24)]
    found, expected = [logits[0]], [row for row, _ in naive_rows]
    last, naive_last = feedback[0][-1:], naive_rows[-1][1]
    for token in tokens[24:]:
        logits, (last,) = steps.step([(0, [token])], [last])
        row, naive_last = naive.row(naive_last, token)
        found.append(logits[0])
        expected.append(row)
    ours, wanted = torch.cat(found).double(), torch.stack(expected)
    error = float((ours - wanted).abs().max() / wanted.abs().max())
    assert error < MAX_RELATIVE_ERROR, f"relative error {error:.2e}"
