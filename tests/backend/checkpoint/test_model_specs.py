"""The list of tensors against the published tables of the real checkpoints."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from kimi_backend.checkpoint.canonical_tensors import CanonicalTensors, canonical_draft_name
from kimi_backend.checkpoint.model_specs import draft_tensor_specs, target_tensor_specs
from kimi_backend.checkpoint.random_tensors import RandomTensors
from kimi_backend.checkpoint.tensor_source import InMemoryTensors
from kimi_backend.checkpoint.tensor_spec import Specs, TensorRole, TensorSpec
from kimi_backend.config.draft_config import DraftOverrides, Eagle3DraftConfig
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.errors import CheckpointError
from support.family_configs import DRAFT_FAMILIES, kimi_k2_instruct, kimi_k25, mha_draft, mla_draft, text_config

TARGET = KimiModelConfig.from_hf_json(kimi_k25())


@cache
def k25_specs() -> Specs:
    return target_tensor_specs(TARGET)


def test_k25_has_the_published_tensors() -> None:
    specs = k25_specs()
    # 208,550 tensors in the index, 335 of them vision and projector.
    assert len(specs) == 208_215
    assert sum(spec.num_bytes for spec in specs.values()) == 594_205_904_896
    expert = "model.layers.1.mlp.experts.0."
    assert sum(spec.num_bytes for name, spec in specs.items() if name.startswith(expert)) == pytest.approx(
        24.77e6, rel=1e-3
    )


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("model.embed_tokens.weight", (163840, 7168), torch.bfloat16),
        ("lm_head.weight", (163840, 7168), torch.bfloat16),
        ("model.norm.weight", (7168,), torch.bfloat16),
        ("model.layers.60.post_attention_layernorm.weight", (7168,), torch.bfloat16),
        ("model.layers.0.self_attn.q_a_proj.weight", (1536, 7168), torch.bfloat16),
        ("model.layers.0.self_attn.q_b_proj.weight", (12288, 1536), torch.bfloat16),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", (576, 7168), torch.bfloat16),
        ("model.layers.0.self_attn.kv_b_proj.weight", (16384, 512), torch.bfloat16),
        ("model.layers.0.self_attn.o_proj.weight", (7168, 8192), torch.bfloat16),
        ("model.layers.0.mlp.gate_proj.weight", (18432, 7168), torch.bfloat16),
        ("model.layers.1.mlp.gate.weight", (384, 7168), torch.bfloat16),
        ("model.layers.1.mlp.gate.e_score_correction_bias", (384,), torch.float32),
        ("model.layers.1.mlp.experts.383.up_proj.weight_packed", (2048, 896), torch.int32),
        ("model.layers.1.mlp.experts.383.up_proj.weight_scale", (2048, 224), torch.bfloat16),
        ("model.layers.1.mlp.experts.383.up_proj.weight_shape", (2,), torch.int32),
        ("model.layers.1.mlp.experts.383.down_proj.weight_packed", (7168, 256), torch.int32),
        ("model.layers.1.mlp.experts.383.down_proj.weight_scale", (7168, 64), torch.bfloat16),
        ("model.layers.1.mlp.shared_experts.down_proj.weight", (7168, 2048), torch.bfloat16),
    ],
)
def test_k25_shapes(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    spec = k25_specs()[name]
    assert (spec.shape, spec.dtypes[0]) == (shape, dtype)


def test_k2_stores_every_linear_layer_in_fp8_blocks() -> None:
    specs = target_tensor_specs(KimiModelConfig.from_hf_json({**kimi_k2_instruct(), "num_hidden_layers": 2}))
    assert specs["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].dtypes == (torch.float8_e4m3fn,)
    # 576 rows are four and a half blocks.
    assert specs["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (5, 56)
    assert specs["model.layers.1.mlp.experts.5.down_proj.weight_scale_inv"].shape == (56, 16)
    for name in ("lm_head", "model.layers.1.mlp.gate"):
        assert specs[f"{name}.weight"].dtypes[0] is torch.bfloat16
        assert f"{name}.weight_scale_inv" not in specs


def test_variants_change_the_list() -> None:
    whole_queries = target_tensor_specs(
        KimiModelConfig.from_hf_json(text_config(num_hidden_layers=1, q_lora_rank=None))
    )
    assert whole_queries["model.layers.0.self_attn.q_proj.weight"].shape == (12288, 7168)
    assert not any("q_a" in name or "q_b" in name for name in whole_queries)


def test_the_mla_draft_weighs_what_its_file_weighs() -> None:
    specs = draft_tensor_specs(Eagle3DraftConfig.from_hf_json(DRAFT_FAMILIES["k2.5-eagle3-mla"], TARGET))
    weights = {name: specs[name] for name in RandomTensors(specs).names() - {"d2t", "t2d"}}
    assert sum(spec.num_bytes for spec in weights.values()) == 6_031_208_448  # published: 6.03 GB
    assert weights["layers.0.self_attn.q_a_proj.weight"].shape == (1536, 14336)
    assert weights["layers.0.self_attn.kv_a_proj_with_mqa.weight"].shape == (576, 14336)
    assert weights["fc.weight"].shape == (7168, 3 * 7168)


def test_the_mha_draft_reads_a_doubled_input() -> None:
    config = Eagle3DraftConfig.from_hf_json(DRAFT_FAMILIES["AQ-MedAI K25 (MHA, 32k)"], TARGET)
    specs = draft_tensor_specs(config)
    assert specs["layers.0.self_attn.k_proj.weight"].shape == (8192, 14336)
    assert specs["lm_head.weight"].shape == (32000, 7168)
    assert specs["d2t"].shape == (32000,)
    assert specs["t2d"].shape == (163840,)
    assert specs["lm_head.weight"].is_required
    assert not specs["embed_tokens.weight"].is_required


def test_what_a_draft_may_lack() -> None:
    full = draft_tensor_specs(Eagle3DraftConfig.from_hf_json(mha_draft(), TARGET))
    assert not full["lm_head.weight"].is_required
    narrow = mla_draft([2, 30, 58], hidden_size=1024, target_hidden_size=7168)
    specs = draft_tensor_specs(Eagle3DraftConfig.from_hf_json(narrow, TARGET))
    assert specs["lm_head.weight"].is_required
    assert specs["embed_tokens.weight"].is_required


def test_norms_that_the_operator_switched_off_may_stay() -> None:
    json, overrides = mla_draft([2, 30, 58], fc_norm=True), DraftOverrides(fc_norm=False)
    specs = draft_tensor_specs(Eagle3DraftConfig.from_hf_json(json, TARGET, overrides), overrides)
    assert not specs["fc_norm.2.weight"].is_required
    assert "fc_norm.0.weight" not in draft_tensor_specs(Eagle3DraftConfig.from_hf_json(mla_draft(), TARGET))


@pytest.mark.parametrize(
    "name", ["midlayer.mlp.up_proj.weight", "midlayer.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"]
)
def test_draft_names_have_one_canonical_spelling(name: str) -> None:
    assert canonical_draft_name(name) == "layers.0.mlp.up_proj.weight"
    stored = {name: torch.arange(6).reshape(3, 2), "fc.weight": torch.zeros(1)}
    source = CanonicalTensors.of_draft(InMemoryTensors(stored), {}, "draft")
    assert source.names() == {"layers.0.mlp.up_proj.weight", "fc.weight"}
    assert source.shape("layers.0.mlp.up_proj.weight") == (3, 2)
    assert source.read("layers.0.mlp.up_proj.weight", 0, 1, 2).tolist() == [[2, 3]]
    with pytest.raises(CheckpointError, match=r"'norm\.weight' is missing"):
        source.read("norm.weight")


def test_two_spellings_of_one_tensor_are_refused() -> None:
    tensors = {"midlayer.hidden_norm.weight": torch.ones(1), "layers.0.hidden_norm.weight": torch.ones(1)}
    with pytest.raises(CheckpointError, match=r"'layers\.0.*' and 'midlayer.*' are the same one"):
        CanonicalTensors.of_draft(InMemoryTensors(tensors), {}, "draft")


def test_fused_tensors_become_their_parts() -> None:
    config = Eagle3DraftConfig.from_hf_json(mla_draft([2, 30, 58]), TARGET)
    specs = draft_tensor_specs(config)
    rows = 1536 + 576
    fused = {"midlayer.self_attn.fused_qkv_a_proj_with_mqa.weight": torch.arange(rows * 8).reshape(rows, 8)}
    source = CanonicalTensors.of_draft(InMemoryTensors(fused), specs, "draft")
    q_a, kv_a = (f"layers.0.self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa"))
    assert source.names() == {q_a, kv_a}
    assert (source.shape(q_a), source.shape(kv_a)) == ((1536, 8), (576, 8))
    whole = next(iter(fused.values()))
    assert torch.equal(source.read(kv_a, 0, 1, 3), whole[1537:1539])
    assert torch.equal(source.read(kv_a, 1, 2, 4), whole[1536:, 2:4])
    assert torch.equal(source.read(q_a), whole[:1536])
    short = {name: tensor[:-1] for name, tensor in fused.items()}
    with pytest.raises(CheckpointError, match=r"expected the rows \[1536, 576\] of .*, found 2111 rows"):
        CanonicalTensors.of_draft(InMemoryTensors(short), specs, "draft")


def test_a_norm_before_the_fc_is_as_wide_as_what_it_reads() -> None:
    config = Eagle3DraftConfig.from_hf_json(mla_draft([2, 30, 58]), TARGET)
    specs = draft_tensor_specs(replace(config, norm_before_fc=True))
    width = 3 * TARGET.hidden_size
    norm = (specs["input_norm.weight"], specs["input_norm.bias"])
    assert [(spec.shape, spec.is_required) for spec in norm] == [((width,), True), ((width,), False)]
    assert specs["fc.weight"].shape == (config.hidden_size, width)
    assert set(specs) - set(draft_tensor_specs(replace(config, norm_before_fc=False))) == {
        "input_norm.weight",
        "input_norm.bias",
    }


@pytest.mark.parametrize(("q_rows", "is_cut"), [(256, False), (255, True), (129, True)])
def test_fused_scales_of_rows_are_cut_between_blocks_only(q_rows: int, is_cut: bool) -> None:
    """Blocks of 128 rows: the first part has two of them, and the last part may end inside one."""

    def scales(num_rows: int) -> TensorSpec:
        shape, matrix = (-(-num_rows // 128), 1), (num_rows, 128)
        dtypes = (torch.float32,)
        return TensorSpec(role=TensorRole.FP8_SCALES, shape=shape, dtypes=dtypes, matrix_shape=matrix, rows_each=128)

    specs = {
        f"layers.0.self_attn.{part}.weight_scale_inv": scales(num_rows)
        for part, num_rows in (("q_a_proj", q_rows), ("kv_a_proj_with_mqa", 200))
    }
    fused = {"midlayer.self_attn.fused_qkv_a_proj_with_mqa.weight_scale_inv": torch.arange(4.0).reshape(4, 1)}
    if is_cut:
        with pytest.raises(CheckpointError, match=r"expected the rows \[2, 2\] of .*, found 4 rows"):
            CanonicalTensors.of_draft(InMemoryTensors(fused), specs, "draft")
        return
    source = CanonicalTensors.of_draft(InMemoryTensors(fused), specs, "draft")
    assert [source.read(name).flatten().tolist() for name in specs] == [[0, 1], [2, 3]]


def test_later_names_of_several_draft_layers() -> None:
    assert canonical_draft_name("midlayer.1.mlp.up_proj.weight") == "layers.1.mlp.up_proj.weight"
