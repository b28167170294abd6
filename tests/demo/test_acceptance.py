"""Each draft of kimi-nano is accepted as often as when its reference was measured, and a worse one is noticed."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from support.nano_acceptance import DRAFTS, FAILS_BELOW, REFERENCES, acceptance_lengths
from support.nano_runs import NANO


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_is_accepted_as_often_as_its_reference_says(name: str) -> None:
    temperatures = [temperature for draft, temperature in REFERENCES if draft == name]
    for temperature, found in zip(temperatures, acceptance_lengths(DRAFTS[name], temperatures), strict=True):
        assert found >= FAILS_BELOW * REFERENCES[name, temperature], temperature


def wrong_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["eagle_config"]["aux_layer_id_encoding"] = "output"  # the ids count inputs
    (folder / "config.json").write_text(json.dumps(config))


def blunt_head(folder: Path) -> None:
    """The draft's last norm scaled: its greedy guesses stay, its sampled ones are drawn from another temperature."""
    weights = load_file(folder / "model.safetensors")
    weights["norm.weight"] *= 0.4
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(("spoil", "temperature"), [(wrong_layers, 0.0), (blunt_head, 1.0)])
def test_a_spoilt_draft_is_noticed(spoil, temperature: float, tmp_path: Path) -> None:
    draft = shutil.copytree(NANO / "draft", tmp_path / "draft")
    spoil(draft)
    (length,) = acceptance_lengths({}, [temperature], folder=draft, num_requests=12)
    assert length < FAILS_BELOW * REFERENCES["as it is", temperature]
