"""Every form in which other servers take a draft's file gives the draft of the plain form."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kimi_backend.checkpoint.loading import DraftCheckpoint
from kimi_backend.config.draft_config import Eagle3MhaDraftConfig, Eagle3MlaDraftConfig
from kimi_backend.errors import CheckpointError
from support.draft_steps import DraftSteps, build_stored_draft
from support.family_configs import FP8_ROWS
from support.tiny_checkpoints import Tensors, dequantized, fp8_with_scales, quantize_fp8, random_draft
from support.tiny_configs import FP8_BLOCK_SIZE, QUANTIZATION_CONFIGS, draft_config, draft_json, target_config

TARGET = target_config()
Config = Eagle3MlaDraftConfig | Eagle3MhaDraftConfig


def run(config: Config, tensors: Tensors) -> torch.Tensor:
    """Logits of five rows, from tensors as a file holds them."""
    draft = build_stored_draft(config, tensors)
    aux = torch.randn(5, 3 * 64, generator=torch.Generator().manual_seed(0))
    return DraftSteps(draft, [8]).step([(0, [3, 1, 4, 1, 5])], [draft.combine_aux(aux)])[0][0]


def fused(tensors: Tensors, name: str, parts: tuple[str, ...], layer: str = "layers.0.") -> Tensors:
    kind = "self_attn" if "q" in name else "mlp"
    names = [f"{layer}{kind}.{part}.weight" for part in parts]
    rest = {key: tensor for key, tensor in tensors.items() if key not in names}
    return {**rest, f"{layer}{kind}.{name}.weight": torch.cat([tensors[key] for key in names])}


def test_fused_matrices() -> None:
    for kind, name, parts in (
        ("mla", "fused_qkv_a_proj_with_mqa", ("q_a_proj", "kv_a_proj_with_mqa")),
        ("mha", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("mha", "gate_up_proj", ("gate_proj", "up_proj")),
    ):
        config = draft_config(kind, TARGET)
        plain = random_draft(config)
        assert torch.equal(run(config, fused(plain, name, parts)), run(config, plain)), name


def test_a_fused_matrix_beside_its_part_is_refused() -> None:
    config = draft_config("mha", TARGET)
    plain = random_draft(config)
    both = fused(plain, "gate_up_proj", ("gate_proj", "up_proj")) | {
        "layers.0.mlp.up_proj.weight": plain["layers.0.mlp.up_proj.weight"]
    }
    with pytest.raises(CheckpointError, match=r"gate_up_proj\.weight' and .*up_proj\.weight' are the same one"):
        run(config, both)


@pytest.mark.parametrize("fuses", [False, True])
def test_fp8_drafts_are_widened(fuses: bool) -> None:
    config = draft_config("mha", TARGET, quantization_config=QUANTIZATION_CONFIGS["fp8"])
    plain = random_draft(draft_config("mha", TARGET))
    stored = quantize_fp8(plain)
    dense = run(draft_config("mha", TARGET), dequantized(stored))
    if fuses:
        for suffix in ("", "_scale_inv"):
            names = [f"layers.0.mlp.{part}_proj.weight{suffix}" for part in ("gate", "up")]
            stored[f"layers.0.mlp.gate_up_proj.weight{suffix}"] = torch.cat([stored.pop(name) for name in names])
    assert torch.equal(run(config, stored), dense)
    assert not torch.equal(dense, run(draft_config("mha", TARGET), plain))


def compressed_fp8(strategy: str, activations: dict[str, Any] | None = None) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["fc", "lm_head"],
    }


def quark_fp8(**weight: Any) -> dict[str, Any]:
    layer = {**FP8_ROWS, "weight": {**FP8_ROWS["weight"], **weight}}
    return {"quant_method": "quark", "exclude": ["fc", "lm_head"], "global_quant_config": layer}


STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
PLAIN_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["fc"]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["fc", "lm_head"], "producer": {}}
WITHOUT_BLOCKS = {**PLAIN_FP8, "activation_scheme": "dynamic", "weight_block_size": None}


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize(
    ("quantization", "scales_of"),
    [
        # Quark's ptpc_fp8, as amd/kimi-k2.5-eagle3-fp8: fc and head stay as they are.
        (quark_fp8(), lambda weight: weight.abs().amax(dim=1)),
        (compressed_fp8("channel"), lambda weight: weight.abs().amax(dim=1, keepdim=True)),
        (quark_fp8(qscheme="per_tensor", ch_axis=None), lambda weight: weight.abs().amax()),
        (compressed_fp8("tensor", STATIC), lambda weight: weight.abs().amax().reshape(1)),
        (PLAIN_FP8, lambda weight: weight.abs().amax()),
        (WITHOUT_BLOCKS, lambda weight: weight.abs().amax()),
        (MODELOPT, lambda weight: weight.abs().amax()),
    ],
    ids=["quark-row", "compressed-row", "quark-one", "compressed-one", "fp8-one-static", "fp8-one", "modelopt"],
)
def test_fp8_drafts_with_a_scale_a_row_or_a_matrix_are_widened(
    quantization: dict[str, Any], scales_of: Callable[[torch.Tensor], torch.Tensor], fuses: bool
) -> None:
    config = draft_config("mha", TARGET, quantization_config=quantization)
    stored = random_draft(draft_config("mha", TARGET))
    if fuses:
        stored = fused(stored, "gate_up_proj", ("gate_proj", "up_proj"))
    for name, tensor in list(stored.items()):
        if name.endswith("_proj.weight"):
            magnitudes = scales_of(tensor)
            quantized = fp8_with_scales(name, tensor, magnitudes if magnitudes.ndim != 1 else magnitudes[:, None])
            scales = quantized[f"{name}_scale"].reshape(magnitudes.shape)
            stored |= {**quantized, f"{name}_scale": scales, f"{name.removesuffix('weight')}input_scale": scales.max()}
    dense = {name: tensor for name, tensor in stored.items() if not name.endswith("input_scale")}
    assert torch.equal(run(config, stored), run(draft_config("mha", TARGET), dequantized(dense)))


def test_a_file_with_other_scales_than_its_config_says_is_refused() -> None:
    config = draft_config("mha", TARGET, quantization_config=compressed_fp8("tensor"))
    stored = random_draft(draft_config("mha", TARGET))
    for name, tensor in list(stored.items()):
        if name.endswith("_proj.weight"):
            stored |= fp8_with_scales(name, tensor, tensor.abs().amax(dim=1, keepdim=True))
    with pytest.raises(CheckpointError, match=r"o_proj\.weight_scale: expected shape \[1\], found \[64, 1\]"):
        run(config, stored)


def test_fp8_scales_may_be_powers_of_two_in_a_byte() -> None:
    config = draft_config("mha", TARGET, quantization_config={**QUANTIZATION_CONFIGS["fp8"], "scale_fmt": "ue8m0"})
    stored = quantize_fp8(random_draft(draft_config("mha", TARGET)))
    scales = {name: scale.log2().ceil().exp2() for name, scale in stored.items() if name.endswith("_scale_inv")}
    as_bytes = {name: scale.to(torch.float8_e8m0fnu) for name, scale in scales.items()}
    assert torch.equal(run(config, {**stored, **as_bytes}), run(config, {**stored, **scales}))


def test_an_fp8_matrix_whose_parts_share_a_block_is_refused() -> None:
    """Each part has scales of its own blocks: one block across both would spoil the later part."""
    config = draft_config(
        "mha", TARGET, quantization_config=QUANTIZATION_CONFIGS["fp8"], intermediate_size=FP8_BLOCK_SIZE * 2 - 8
    )
    stored = quantize_fp8(random_draft(draft_config("mha", TARGET, intermediate_size=FP8_BLOCK_SIZE * 2 - 8)))
    for suffix in ("", "_scale_inv"):
        names = [f"layers.0.mlp.{part}_proj.weight{suffix}" for part in ("gate", "up")]
        stored[f"layers.0.mlp.gate_up_proj.weight{suffix}"] = torch.cat([stored.pop(name) for name in names])
    with pytest.raises(CheckpointError, match=r"gate_up_proj\.weight_scale_inv: expected the rows"):
        run(config, stored)


@pytest.mark.parametrize("ignored", ["fc", "model.midlayer.mlp", "re:.*down_proj"])
def test_fp8_drafts_may_leave_modules_as_they_are(ignored: str) -> None:
    changes = {"quantization_config": {**QUANTIZATION_CONFIGS["fp8"], "ignored_layers": [ignored]}}
    config, plain = draft_config("mha", TARGET, **changes), random_draft(draft_config("mha", TARGET))
    stored = quantize_fp8(plain)
    for name in [name for name in plain if name.removesuffix(".weight") in _covered(ignored)]:
        stored[name] = plain[name]
        del stored[f"{name}_scale_inv"]
    assert run(config, stored).isfinite().all()


def _covered(ignored: str) -> list[str]:
    mlp = [f"layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")]
    return {"fc": ["fc"], "model.midlayer.mlp": mlp}.get(ignored, mlp[2:])


def test_a_tied_head_is_the_drafts_embedding() -> None:
    plain = random_draft(draft_config("mha", TARGET), with_head=False)
    own = {**plain, "lm_head.weight": plain["embed_tokens.weight"]}
    tied = draft_config("mha", TARGET, tie_word_embeddings=True)
    assert torch.equal(run(tied, plain), run(draft_config("mha", TARGET), own))
    other = random_draft(draft_config("mha", TARGET), seed=5)
    assert torch.equal(run(tied, other), run(draft_config("mha", TARGET), other)), "a head in the file wins"


def test_absolute_token_ids() -> None:
    config = draft_config("mha", TARGET, draft_vocab_size=48)
    plain = random_draft(config)
    absolute = {**plain, "d2t": plain["d2t"] + torch.arange(48)}
    assert torch.equal(run(config, absolute), run(config, plain))
    del absolute["t2d"]
    with pytest.raises(CheckpointError, match="d2t holds offsets"):
        run(config, absolute)


def test_names_of_several_layers() -> None:
    config = draft_config("mla", TARGET, num_hidden_layers=2)
    plain = random_draft(config)
    stored = {f"model.{name.replace('layers.', 'midlayer.')}": tensor for name, tensor in plain.items()}
    stored["model.midlayer.1.hidden_norm.weight"] = torch.ones(64)  # trainers make it, nothing reads it
    assert torch.equal(run(config, stored), run(config, plain))
    with pytest.raises(CheckpointError, match=r"layers\.1\.input_layernorm\.weight: missing"):
        run(config, {name: tensor for name, tensor in plain.items() if name != "layers.1.input_layernorm.weight"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.\S+: unexpected"):
        run(draft_config("mla", TARGET), plain)


def test_biases_that_the_config_promises_must_be_there() -> None:
    config = draft_config("mha", TARGET, attention_bias=True)
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.k_proj\.bias: missing"):
        run(config, random_draft(config))


def test_a_folder_in_the_speculators_layout(tmp_path: Path) -> None:
    fields = draft_json("mha", draft_vocab_size=48, norm_before_residual=True)
    config = draft_config("mha", TARGET, draft_vocab_size=48, norm_before_residual=True)
    layer: dict[str, Any] = {name: value for name, value in fields.items() if name not in ("architectures",)}
    flags = {name: layer.pop(name) for name in ("draft_vocab_size", "norm_before_residual")}
    top = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", **flags}
    top |= {"transformer_layer_config": layer, **layer.pop("eagle_config")}
    (tmp_path / "config.json").write_text(json.dumps(top))
    save_file(random_draft(config), tmp_path / "model.safetensors")
    opened = DraftCheckpoint.open(tmp_path, TARGET)
    assert (opened.config, opened.config.warnings) == (config, ())
