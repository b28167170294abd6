"""`kimi inspect` says what is in the files and what fits."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kimi_backend.checkpoint.model_specs import target_tensor_specs
from kimi_backend.checkpoint.presets import Architecture, DraftKind
from kimi_backend.cli import inspect as inspect_module
from kimi_backend.cli.checkpoint_report import active_parameters, describe_rope, num_parameters, report_text
from kimi_backend.cli.cost_report import costs_report
from kimi_backend.cli.main import app
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.config.quantization_config import QuantizationMethod
from kimi_backend.config.rope_config import RopeConfig, RopeType
from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import CheckpointError
from kimi_backend.runners.cost_file import CostFile
from support.checkpoint_folders import copy_folder, edit_json, edit_weights, make_tiny
from support.family_configs import TARGET_FAMILIES
from support.made_up_costs import linear_costs
from support.tiny_configs import target_json


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("inspected") / "out", QuantizationMethod.INT4, DraftKind.MHA)


def inspect(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    app(["inspect", *arguments, "--json"], standalone_mode=False)
    return json.loads(capsys.readouterr().out)


def test_it_reports_both_models(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = inspect(capsys, str(folder), "--draft", str(folder / "draft"))
    target, draft = report["target"], report["draft"]
    assert "memory_plan" not in report
    assert target["architecture"] == "KimiK25ForConditionalGeneration"
    assert target["format"] == "routed experts int4 in groups of 32, the rest bfloat16"
    assert target["num_hidden_layers"] == 2
    assert target["eos_token_ids"] == [1793, 1794]
    assert target["kv_bytes_per_token"] == {"bfloat16": 2 * 80 * 2, "float8_e4m3fn": 2 * 80}
    weight_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert weight_bytes - 100_000 < target["num_bytes"] < weight_bytes
    assert (draft["attention"], draft["algorithm"]) == ("MHA", "EAGLE3")
    assert draft["aux_layer_ids"] == [0, 1, 2]
    assert draft["draft_vocab_size"] == 512
    assert (draft["embedding"], draft["head"]) == ("own", "own")
    assert draft["kv_bytes_per_token"]["bfloat16"] == 2 * 2 * 32 * 2


@pytest.mark.parametrize("has_draft", [True, False])
def test_costs_that_a_server_has_kept_and_what_is_chosen_by_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_draft: bool
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    draft = folder / "draft"
    arguments = [str(folder), *(["--draft", str(draft)] if has_draft else [])]
    assert "step_costs" not in inspect(capsys, *arguments)
    app(["inspect", *arguments], standalone_mode=False)
    assert "times its steps at its first start" in " ".join(capsys.readouterr().out.split())
    settings = ServingSettings(checkpoint=str(folder), draft=str(draft) if has_draft else "", max_num_seqs=5)
    costs = {"target": linear_costs(3000, 40)} | ({"draft": linear_costs(100, 5, 10)} if has_draft else {})
    for role, of_role in costs.items():
        CostFile.of(role, settings, None, torch.device("cpu")).write(of_role)
    CostFile.of("target", replace(settings, draft="another"), None, torch.device("cpu")).write(linear_costs(1, 1))
    report = inspect(capsys, *arguments)["step_costs"]
    assert report == costs_report(costs, report["device"])
    assert report["target"]["step_ms"]["4"] == {"1": 3.16, "2": 3.32, "4": 3.64, "8": 4.28}
    assert ("choices" in report) is has_draft
    app(["inspect", *arguments], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "3.640" in shown
    if has_draft:
        chosen = {(item["num_seqs"], item["acceptance"]): item for item in report["choices"]}
        assert len(chosen) == 12
        assert chosen[1, "high"]["num_draft_tokens"] > chosen[64, "high"]["num_draft_tokens"] > 0
        assert chosen[64, "low"]["num_draft_tokens"] == 0
        assert chosen[1, "low"]["tokens_per_second"] > chosen[1, "low"]["without_a_draft"] == round(1e6 / 3040, 1)
        assert f"{chosen[1, 'high']['num_draft_tokens']:g} (+" in shown


def test_a_cheaper_draft_leaves_more_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(folder), "--draft", str(folder / "draft"), "--gpu-memory", "3.5"]
    plans = [
        inspect(capsys, *arguments, *options)["memory_plan"]
        for options in ([], ["--draft-vocab", "128"], ["--draft-quantization", "int4"])
    ]
    whole, reduced, rounded = (plan["draft_weight_bytes"] for plan in plans)
    assert whole - reduced == (512 - 128) * 128 * 2
    assert rounded < reduced
    assert plans[2]["num_kv_tokens"] > plans[0]["num_kv_tokens"]


def test_it_plans_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(folder), "--draft", str(folder / "draft"), "--tp", "2", "--block-size", "32"]
    plan = inspect(capsys, *arguments, "--gpu-memory", "6")["memory_plan"]
    assert plan["fits"]
    assert plan["tp_size"] == 2
    assert plan["num_kv_tokens"] == plan["num_target_blocks"] * 32
    assert plan["draft_kv_bytes_per_token"] == 2 * 1 * 32 * 2
    none = inspect(capsys, *arguments, "--gpu-memory", "1")["memory_plan"]
    assert none == {
        "fits": False,
        "reason": none["reason"],
        "gpu_bytes": 1 << 30,
        "tp_size": 2,
    }
    assert none["reason"].startswith("the weights do not fit: 5.")


def test_a_draft_that_borrows_says_so(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = copy_folder(folder / "draft", tmp_path / "draft")
    edit_weights(draft, lambda tensors: tensors.pop("embed_tokens.weight"))
    assert inspect(capsys, str(folder), "--draft", str(draft))["draft"]["embedding"] == "the target's"


def test_values_need_not_be_read(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoilt = copy_folder(folder, tmp_path / "spoilt")
    edit_weights(spoilt, lambda tensors: tensors["language_model.model.norm.weight"].fill_(float("nan")))
    assert inspect(capsys, str(spoilt), "--no-values")["target"]["num_hidden_layers"] == 2


def test_the_tables_say_the_same(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    app(["inspect", str(folder), "--draft", str(folder / "draft"), "--gpu-memory", "3"], standalone_mode=False)
    shown = capsys.readouterr().out
    for text in ("KimiK25ForConditionalGeneration", "aux layer ids", "0, 1, 2", "3,221,225,472 (3.000 GiB)", "MHA"):
        assert text in shown


@pytest.mark.parametrize("architecture", Architecture)
@pytest.mark.parametrize(
    ("quantization", "text"),
    [
        (QuantizationMethod.NONE, "bfloat16"),
        (
            QuantizationMethod.MXFP4,
            "routed experts, shared experts and dense MLPs mxfp4 in groups of 32, the rest bfloat16",
        ),
        (
            QuantizationMethod.FP8,
            "routed experts, shared experts, dense MLPs and attention fp8 in blocks of 128 x 128, the rest bfloat16",
        ),
    ],
)
def test_formats_are_described(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    architecture: Architecture,
    quantization: QuantizationMethod,
    text: str,
) -> None:
    folder = make_tiny(tmp_path / "out", quantization, DraftKind.MLA31, architecture)
    report = inspect(capsys, str(folder), "--draft", str(folder / "draft"))
    assert report["target"]["format"] == text
    assert report["draft"]["algorithm"] == "EAGLE3.1"


@pytest.mark.parametrize("family", TARGET_FAMILIES)
def test_every_family_has_a_trillion_parameters(family: str) -> None:
    config = KimiModelConfig.from_hf_json(TARGET_FAMILIES[family])
    specs = target_tensor_specs(config)
    total = num_parameters(specs)
    assert total == pytest.approx(1.027e12, rel=0.001)
    assert active_parameters(config, specs) == pytest.approx(32.9e9, rel=0.02)  # "32B activated"


def test_configs_alone_are_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Configs without weights are what one fetches first, and what `make-checkpoint --no-weights` writes."""
    out = tmp_path / "out"
    app(["make-checkpoint", str(out), "--no-weights"], standalone_mode=False)
    assert f"kimi inspect {out}" in capsys.readouterr().out
    report = inspect(capsys, str(out), "--draft", str(out / "draft"), "--gpu-memory", "4")
    assert report["target"]["weights"].startswith("not here")
    assert report["draft"]["weights"].startswith("not here")
    assert report["memory_plan"]["fits"] is True
    assert report["text"]["files"] == "tiktoken.model"
    assert re.fullmatch(r"renders a user's turn in \d+ tokens", report["text"]["chat_template"])


def test_a_plan_that_does_not_fit_has_an_exit_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = app(["inspect", str(folder), "--gpu-memory", "1", "--json"], standalone_mode=False)
    assert (code, json.loads(capsys.readouterr().out)["memory_plan"]["fits"]) == (1, False)


def test_the_tokenizer_must_fit_the_model(folder: Path, tmp_path: Path) -> None:
    broken = copy_folder(folder, tmp_path / "broken")
    (broken / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"999999999999": {"content": "<a>"}}}')
    with pytest.raises(CheckpointError, match=r"added_tokens_decoder|tokenizer has 1000000000000"):
        app(["inspect", str(broken)], standalone_mode=False)
    edit_json(
        copy_folder(folder, tmp_path / "small") / "config.json",
        lambda config: config["text_config"].update(vocab_size=1500, eos_token_id=1),
    )
    with pytest.raises(CheckpointError, match="the tokenizer has 2048 tokens, the model's vocab_size is 1500"):
        report_text(tmp_path / "small", KimiModelConfig.from_hf_json(target_json(vocab_size=1500)))


def test_a_warning_is_part_of_the_report(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = copy_folder(folder, tmp_path / "changed")
    edit_json(changed / "draft" / "config.json", lambda config: config.update(max_position_embeddings=512, new_gate=1))
    warnings = inspect(capsys, str(changed), "--draft", str(changed / "draft"))["draft"]["warnings"]
    assert "max_position_embeddings is 512, the target's is 4096" in warnings[0]
    assert "does not know and ignores new_gate 1" in warnings[1]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"type": RopeType.DEFAULT}, "theta 10000, interleaved"),
        ({"type": RopeType.LINEAR, "factor": 2.0, "interleaved": False}, "linear, theta 10000, factor 2, half-split"),
        (
            {"type": RopeType.LLAMA3, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "llama3, theta 10000, factor 8 over 4096, turns 1 to 4, interleaved",
        ),
        (
            {"type": RopeType.YARN, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0},
            "yarn, theta 10000, factor 8 over 4096, beta_fast 32, beta_slow 1, interleaved",
        ),
    ],
)
def test_a_rotary_embedding_in_words(changes: dict[str, Any], text: str) -> None:
    fields = {"theta": 10_000.0, "interleaved": True, "original_max_position_embeddings": 4096}
    assert describe_rope(RopeConfig(**{**fields, **changes})) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("", {"a": 1, "b": [1, 2]}, "a 1, b 1, 2"),
        ("fits", True, "yes"),
        ("fits", False, "no"),
        ("gpu_bytes", 3 << 30, "3,221,225,472 (3.000 GiB)"),
        ("num_tokens", 1234567, "1,234,567"),
        ("scale", 0.1, "0.100000"),
        ("path", None, "None"),
    ],
)
def test_values_in_words(name: str, value: Any, text: str) -> None:
    assert inspect_module._text(name, value) == text


def test_a_template_that_refuses_and_a_folder_without_a_tokenizer_are_told(folder: Path, tmp_path: Path) -> None:
    refuses = copy_folder(folder, tmp_path / "refuses")
    (refuses / "chat_template.jinja").write_text("{{ raise_exception('not you') }}")
    target = KimiModelConfig.from_hf_json(refuses)
    assert report_text(refuses, target)["chat_template"].startswith("refuses a user's turn: ")
    (tmp_path / "empty").mkdir()
    assert report_text(tmp_path / "empty", target)["files"].startswith("none here")
