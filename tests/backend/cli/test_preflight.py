"""Faults that would keep a server from starting are reported before that, in one message, without a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_backend.checkpoint.presets import DraftKind
from kimi_backend.cli import preflight
from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import CheckpointError
from kimi_backend.runners.load.opened_checkpoints import check_servable
from support.checkpoint_breaks import put, truncate
from support.checkpoint_folders import copy_folder, edit_json, edit_weights, make_tiny
from support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("served") / "out", draft=DraftKind.MLA)


def serve(folder: Path, draft: Path, *options: str) -> tuple[int, str]:
    """Exit code and stderr of a `kimi serve` that must not start a server."""
    command = [sys.executable, "-m", "kimi_backend.cli.main", "serve", "--checkpoint", str(folder)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "--draft", str(draft), *options], capture_output=True, text=True, timeout=PATIENCE_S, env=environment
    )
    return done.returncode, done.stderr


def test_a_missing_gpu(folder: Path) -> None:
    code, said = serve(folder, folder / "draft", "--device", "cuda")
    assert (code, "Traceback" in said) == (2, False)
    assert "setting device: cuda given, but the CUDA driver shows no GPUs here" in said


def test_a_draft_of_another_target(folder: Path, tmp_path: Path) -> None:
    draft = copy_folder(folder / "draft", tmp_path / "draft")
    edit_json(draft / "config.json", lambda config: config.update(hidden_size=96))
    code, said = serve(folder, draft, "--device", "cpu")
    assert (code, "Traceback" in said) == (2, False)
    assert "hidden_size is 96, expected 128, the target's hidden_size" in said


def test_a_chat_template_that_does_not_compile(folder: Path, tmp_path: Path) -> None:
    broken = copy_folder(folder, tmp_path / "broken")
    (broken / "chat_template.jinja").write_text("{% if %}")
    code, said = serve(broken, broken / "draft", "--device", "cpu")
    assert (code, "Traceback" in said) == (2, False)
    assert "chat_template.jinja" in said


def test_a_draft_that_is_wrong_in_its_tensors_is_told_before_the_targets_files_are_opened(
    folder: Path, tmp_path: Path
) -> None:
    """Kimi-K2.5 has 208,215 tensors, whose headers alone take seconds."""
    broken = copy_folder(folder, tmp_path / "broken")
    truncate("model.safetensors", 100)(broken)
    edit_weights(broken / "draft", put("fc.weight", lambda weight: weight[1:]))
    settings = ServingSettings(checkpoint=str(broken), draft=str(broken / "draft"), device="cpu")
    with pytest.raises(CheckpointError, match=r"draft: fc\.weight: expected shape"):
        check_servable(settings)


def test_warnings_stand_there_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KIMI_MAX_MODEL_LENGTH", "4096")
    monkeypatch.setenv("KIMI_CHECKPOINT", "/nowhere")
    assert preflight.main() == preflight.EXIT_BAD_INPUT
    assert capsys.readouterr().err.count("KIMI_MAX_MODEL_LENGTH") == 1
