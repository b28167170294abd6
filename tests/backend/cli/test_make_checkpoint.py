"""`kimi make-checkpoint` writes what a real checkpoint has, the same for the same seed."""

import hashlib
import json
from pathlib import Path

import pytest

from kimi_backend.checkpoint.loading import DraftCheckpoint, TargetCheckpoint
from kimi_backend.checkpoint.presets import (
    Architecture,
    DraftKind,
    Preset,
    draft_config_json,
    target_config_json,
    vocab_size,
)
from kimi_backend.cli.main import app
from kimi_backend.config.draft_config import Eagle3DraftConfig, Eagle3MhaDraftConfig
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.config.quantization_config import QuantizationMethod
from kimi_backend.errors import CheckpointError
from kimi_backend.text.tokenizer import load_tokenizer
from support.family_configs import kimi_k25, mla_draft

FILES = {
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tiktoken.model",
    "chat_template.jinja",
    "model.safetensors",
}


def make(out: Path, *arguments: str) -> Path:
    app(["make-checkpoint", str(out), *arguments], standalone_mode=False)
    return out


def digests(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_it_writes_both_models_and_the_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = make(tmp_path / "out", "--layers", "2")
    assert {path.name for path in out.iterdir()} == FILES | {"draft"}
    assert {path.name for path in (out / "draft").iterdir()} == {"config.json", "model.safetensors"}
    assert f"{out}: tiny target (int4) and mla draft" in capsys.readouterr().out
    target = TargetCheckpoint.open(out)
    DraftCheckpoint.open(out / "draft", target.config)
    tokenizer = load_tokenizer(out)
    assert tokenizer.vocab_size == target.config.vocab_size
    assert tokenizer.decode(tokenizer.encode("def add(a, b):")) == "def add(a, b):"
    assert set(tokenizer.eos_token_ids) <= set(target.config.eos_token_ids)


def test_the_same_seed_makes_the_same_files(tmp_path: Path) -> None:
    first, again = make(tmp_path / "first", "--layers", "2"), make(tmp_path / "again", "--layers", "2")
    other = make(tmp_path / "other", "--layers", "2", "--seed", "1")
    assert digests(first) == digests(again)
    changed = {name for name, digest in digests(other).items() if digest != digests(first)[name]}
    assert changed == {"model.safetensors", "draft/model.safetensors"}


def test_it_shards_when_asked(tmp_path: Path) -> None:
    out = make(tmp_path / "out", "--layers", "2", "--shard-gb", "0.001")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert all(name.startswith("language_model.") for name in index["weight_map"])


def test_it_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is there already, expected a new name or an empty folder"):
        make(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("layers", [1, 2, 3, 6, 7, 61])
@pytest.mark.parametrize("preset", Preset)
@pytest.mark.parametrize("kind", DraftKind)
def test_every_depth_has_a_draft(layers: int, preset: Preset, kind: DraftKind) -> None:
    json_target = target_config_json(preset, layers, QuantizationMethod.INT4, Architecture.KIMI_K25, {})
    target = KimiModelConfig.from_hf_json(json_target)
    draft = Eagle3DraftConfig.from_hf_json(draft_config_json(kind, preset, layers), target)
    assert draft.num_aux_hidden_states == (2 if layers == 1 else 3)
    assert draft.aux_layer_ids[-1] <= layers
    assert isinstance(draft, Eagle3MhaDraftConfig) == (kind is DraftKind.MHA)
    assert (draft.draft_vocab_size < target.vocab_size) == (kind is DraftKind.MHA)
    if layers == 61:
        assert draft.aux_layer_ids == (2, 30, 58)


def test_the_full_width_preset_is_kimi() -> None:
    token_ids = {"bos_token_id": 163584, "eos_token_id": 163585, "pad_token_id": 163839}
    ours = target_config_json(Preset.KIMI_K25, 61, QuantizationMethod.INT4, Architecture.KIMI_K25, token_ids)
    assert KimiModelConfig.from_hf_json(ours) == KimiModelConfig.from_hf_json(kimi_k25())
    assert vocab_size(Preset.KIMI_K25) == 163840
    target = KimiModelConfig.from_hf_json(ours)
    draft = draft_config_json(DraftKind.MLA, Preset.KIMI_K25, 61)
    assert Eagle3DraftConfig.from_hf_json(draft, target) == Eagle3DraftConfig.from_hf_json(
        mla_draft([2, 30, 58]), target
    )
