"""Every form in which other servers take a target's files gives the target of the plain form."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kimi_backend.checkpoint.loading import TargetCheckpoint
from kimi_backend.config.model_config import KimiModelConfig
from kimi_kernels.kernel_set import KernelSet
from support.target_steps import TargetSteps, build_target
from support.tiny_checkpoints import Tensors, random_target
from support.tiny_configs import QUANTIZATION_CONFIGS, target_json

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
Change = Callable[[Tensors], Tensors]


def run(config: KimiModelConfig, tensors: Tensors) -> torch.Tensor:
    return TargetSteps(build_target(config, tensors), KernelSet.plain(), [len(TOKENS)]).run(TOKENS, [len(TOKENS)])[0]


def opened(folder: Path, fields: dict[str, Any], tensors: Tensors) -> torch.Tensor:
    """Logits of a checkpoint folder."""
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    checkpoint = TargetCheckpoint.open(folder)
    return run(checkpoint.config, {name: checkpoint.tensors.read(name) for name in checkpoint.tensors.names()})


def renamed(prefix: str, head: str, *others: str) -> Change:
    def change(tensors: Tensors) -> Tensors:
        names = {name: prefix + name.removeprefix("model.") if name.startswith("model.") else head for name in tensors}
        return {names[name]: tensor for name, tensor in tensors.items()} | {name: torch.ones(2) for name in others}

    return change


def fused(tensors: Tensors) -> Tensors:
    """Down-projections, and gate and up of the dense layer and the shared experts, in one matrix each."""
    stacked: dict[str, list[torch.Tensor]] = {}
    names = {"q_a_proj": "fused_qkv_a_proj_with_mqa", "kv_a_proj_with_mqa": "fused_qkv_a_proj_with_mqa"}
    names |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    for name in sorted(tensors, key=lambda name: "kv_a_proj" in name):  # q_a_proj stands above kv_a_proj_with_mqa
        part = name.split(".")[-2] if "." in name else ""
        key = name.replace(part, names[part]) if part in names and ".experts." not in name else name
        stacked.setdefault(key, []).append(tensors[name])
    return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in stacked.items()}


FORMS: dict[str, Change] = {
    "multimodal": renamed("language_model.model.", "language_model.lm_head.weight", "vision_tower.patch.weight"),
    "transformers 5": renamed("model.language_model.", "lm_head.weight", "model.visual.patch.weight"),
    "other projector": renamed("language_model.model.", "language_model.lm_head.weight", "multi_modal_projector.a"),
    "fused": fused,
}


@pytest.mark.parametrize("form", FORMS)
def test_names_and_fused_matrices(form: str, tmp_path: Path) -> None:
    fields = target_json()
    plain = random_target(KimiModelConfig.from_hf_json(fields))
    changed = FORMS[form](plain)
    assert changed.keys() != plain.keys()
    assert torch.equal(opened(tmp_path, fields, changed), run(KimiModelConfig.from_hf_json(fields), plain))


def test_fused_matrices_of_an_fp8_file(tmp_path: Path) -> None:
    fields = target_json("fp8")
    plain = random_target(KimiModelConfig.from_hf_json(fields))
    assert torch.equal(opened(tmp_path, fields, fused(plain)), run(KimiModelConfig.from_hf_json(fields), plain))


def test_fp8_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    fields = target_json(quantization_config={**QUANTIZATION_CONFIGS["fp8"], "scale_fmt": "ue8m0"})
    config = KimiModelConfig.from_hf_json(fields)
    plain = random_target(config)
    powers = {name: s.log2().ceil().exp2() for name, s in plain.items() if name.endswith("_scale_inv")}
    as_bytes = {name: scale.to(torch.float8_e8m0fnu) for name, scale in powers.items()}
    assert torch.equal(opened(tmp_path, fields, {**plain, **as_bytes}), run(config, {**plain, **powers}))


def test_an_int4_file_that_names_its_modules(tmp_path: Path) -> None:
    """llm-compressor names the modules that exist in `ignore`, or the experts in `targets`."""
    plain = random_target(KimiModelConfig.from_hf_json(target_json("int4")))
    expected = run(KimiModelConfig.from_hf_json(target_json("int4")), plain)
    modules = [name.removesuffix(".weight") for name in plain if name.endswith("_proj.weight") or "with_mqa" in name]
    int4 = QUANTIZATION_CONFIGS["int4"]
    named = {**int4, "ignore": ["lm_head", *modules]}
    group = {**int4["config_groups"]["group_0"], "targets": [r"re:.*mlp\.experts\..*"]}
    group["weights"] = {**group["weights"], "actorder": "static"}
    targeted = {**int4, "ignore": [], "config_groups": {"group_0": group}}
    for quantization in (named, targeted):
        assert torch.equal(opened(tmp_path, target_json(quantization_config=quantization), plain), expected)
