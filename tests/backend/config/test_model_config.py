"""Target configs: every family parses to its documented numbers; junk is refused with the field's name."""

import copy
import json
import math
import os
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kimi_backend.checkpoint.model_specs import target_tensor_specs
from kimi_backend.checkpoint.tensor_spec import TensorRole
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.config.quantization_config import QuantizationMethod
from kimi_backend.errors import ConfigError
from support.family_configs import (
    FP8_ROWS,
    TARGET_FAMILIES,
    Json,
    fp8_quantization,
    int4_quantization,
    kimi_k25,
    quark_quantization,
    text_config,
    yarn,
)
from support.waiting import PATIENCE_S

POSITIVE_INTEGERS = [
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "vocab_size",
    "max_position_embeddings",
]
OPTIONAL_POSITIVE_INTEGERS = ["n_group", "topk_group", "moe_layer_freq", "q_lora_rank", "num_key_value_heads"]
COUNTS = ["n_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers"]
POSITIVE_NUMBERS = ["rms_norm_eps", "routed_scaling_factor", "rope_theta"]
BOOLEANS = ["norm_topk_prob", "rope_interleave"]

NOT_POSITIVE_INTEGERS = st.one_of(
    st.integers(max_value=0),
    st.integers(min_value=2**31),
    st.booleans(),
    st.floats(allow_nan=True),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
)
NOT_POSITIVE_NUMBERS = st.one_of(
    st.floats(max_value=0.0),
    st.sampled_from([math.nan, math.inf, -math.inf, -1, 0, True, False]),
    st.text(max_size=8),
    st.lists(st.floats(), max_size=2),
)


@pytest.mark.parametrize("family", TARGET_FAMILIES)
def test_every_family_parses_to_its_documented_numbers(family: str) -> None:
    config = KimiModelConfig.from_hf_json(TARGET_FAMILIES[family])
    assert config.latent_dim == 576
    assert config.qk_head_dim == 192
    assert config.kv_bytes_per_token("bfloat16") == 70_272
    assert config.kv_bytes_per_token("float8_e4m3fn") == 35_136
    assert config.rope.cos_sin_scale == 1.0
    assert config.rope.interleaved
    assert [config.is_moe_layer(layer) for layer in (0, 1, 60)] == [False, True, True]
    assert config.num_moe_layers == 60


@pytest.mark.parametrize(
    ("family", "scale", "eps", "beta_fast", "method"),
    [
        ("K2-Instruct", 192**-0.5 * (0.1 * math.log(32) + 1) ** 2, 1e-6, 1.0, QuantizationMethod.FP8),
        ("K2-Instruct-0905", 0.144680, 1e-6, 1.0, QuantizationMethod.FP8),
        ("K2-Thinking", 0.144680, 1e-5, 1.0, QuantizationMethod.INT4),
        ("K2.5", 0.144680, 1e-5, 32.0, QuantizationMethod.INT4),
        ("K2.5-MXFP4", 0.144680, 1e-5, 32.0, QuantizationMethod.MXFP4),
        ("K2-Thinking-FP8-Block", 0.144680, 1e-5, 32.0, QuantizationMethod.FP8),
    ],
)
def test_families_differ_where_they_should(
    family: str, scale: float, eps: float, beta_fast: float, method: QuantizationMethod
) -> None:
    config = KimiModelConfig.from_hf_json(TARGET_FAMILIES[family])
    assert config.softmax_scale == pytest.approx(scale, abs=5e-7)
    assert config.rms_norm_eps == eps
    assert config.rope.beta_fast == beta_fast
    assert config.quantization.method is method


def test_token_ids_come_from_both_files(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(kimi_k25()))
    assert KimiModelConfig.from_hf_json(tmp_path).eos_token_ids == (163585,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [163586, 163585]}))
    for source in (tmp_path, tmp_path / "config.json", str(tmp_path)):
        config = KimiModelConfig.from_hf_json(source)
        assert config.eos_token_ids == (163585, 163586)
        assert (config.bos_token_id, config.pad_token_id) == (163584, 163839)
    assert KimiModelConfig.from_hf_json(kimi_k25(), {"eos_token_id": 163586}).eos_token_ids == (163585, 163586)


def test_transformers_5_rope_parameters_read_like_rope_scaling() -> None:
    old = KimiModelConfig.from_hf_json(text_config())
    new = text_config()
    del new["rope_theta"], new["rope_scaling"]
    scaling = yarn()
    scaling["rope_type"] = scaling.pop("type")
    new["rope_parameters"] = {"rope_theta": 50000.0, **scaling}
    assert KimiModelConfig.from_hf_json(new) == old


def test_absent_fields_have_their_defaults() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    absent = {
        "n_shared_experts": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "rope_interleave": True,
    }
    in_scaling = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    least = {name: value for name, value in text_config(rope_scaling=scaling).items() if name not in absent}
    config = KimiModelConfig.from_hf_json(least)
    assert config == KimiModelConfig.from_hf_json(text_config(rope_scaling=scaling | in_scaling, **absent))
    assert (config.n_shared_experts, config.moe_layer_freq, config.num_nextn_predict_layers) == (0, 1, 0)
    assert (config.bos_token_id, config.pad_token_id) == (None, None)


def test_plain_rope_needs_no_scaling() -> None:
    expected = KimiModelConfig.from_hf_json(text_config(rope_scaling=None))
    assert not expected.rope.is_yarn
    assert expected.softmax_scale == pytest.approx(192**-0.5)
    plain = text_config(rope_parameters={"rope_theta": 50000.0, "rope_type": "default"})
    del plain["rope_theta"], plain["rope_scaling"]
    assert KimiModelConfig.from_hf_json(plain) == expected


def test_agrees_with_the_library_that_wrote_the_file(tmp_path: Any) -> None:
    from transformers import DeepseekV3Config

    theirs = DeepseekV3Config(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        rope_parameters={"rope_theta": 123.0, **yarn(8.0), "rope_type": "yarn"},
        n_routed_experts=16,
        n_group=4,
        topk_group=2,
    )
    theirs.architectures = ["DeepseekV3ForCausalLM"]
    theirs.save_pretrained(tmp_path)
    ours = KimiModelConfig.from_hf_json(tmp_path)
    assert (ours.hidden_size, ours.num_hidden_layers, ours.n_group, ours.topk_group) == (64, 3, 4, 2)
    assert (ours.rope.theta, ours.rope.factor, ours.rope.is_yarn) == (123.0, 8.0, True)


def test_queries_need_not_be_compressed() -> None:
    assert KimiModelConfig.from_hf_json(text_config(q_lora_rank=None)).q_lora_rank is None


@given(
    first_dense=st.integers(0, 12),
    freq=st.integers(1, 4),
    groups=st.sampled_from([1, 2, 4]),
    group_experts=st.integers(2, 8),
    heads=st.integers(1, 9),
    rank=st.one_of(st.none(), st.integers(1, 64)),
    data=st.data(),
)
def test_any_consistent_config_parses(
    first_dense: int, freq: int, groups: int, group_experts: int, heads: int, rank: int | None, data: st.DataObject
) -> None:
    topk_group = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, topk_group * group_experts))
    config = KimiModelConfig.from_hf_json(
        text_config(
            num_hidden_layers=12,
            first_k_dense_replace=first_dense,
            moe_layer_freq=freq,
            n_group=groups,
            n_routed_experts=groups * group_experts,
            topk_group=topk_group,
            num_experts_per_tok=top_k,
            num_attention_heads=heads,
            q_lora_rank=rank,
        )
    )
    for layer in range(12):
        assert config.is_moe_layer(layer) == (layer >= first_dense and layer % freq == 0)
    assert (config.topk_group, config.num_experts_per_tok, config.q_lora_rank) == (topk_group, top_k, rank)


@given(
    field=st.sampled_from(POSITIVE_INTEGERS + OPTIONAL_POSITIVE_INTEGERS),
    junk=NOT_POSITIVE_INTEGERS,
    nested=st.booleans(),
)
def test_junk_in_an_integer_is_refused_by_name(field: str, junk: Any, nested: bool) -> None:
    changed = kimi_k25(**{field: junk}) if nested else text_config(**{field: junk})
    with pytest.raises(ConfigError, match=rf"(?s)\b{field} is .*, expected an integer of at least 1"):
        KimiModelConfig.from_hf_json(changed)


@given(
    field=st.sampled_from(COUNTS),
    junk=st.one_of(st.integers(max_value=-1), st.booleans(), st.text(max_size=4), st.floats()),
)
def test_junk_in_a_count_is_refused_by_name(field: str, junk: Any) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)\b{field} is .*, expected an integer of at least 0"):
        KimiModelConfig.from_hf_json(text_config(**{field: junk}))


@given(field=st.sampled_from(POSITIVE_NUMBERS), junk=NOT_POSITIVE_NUMBERS)
def test_junk_in_a_number_is_refused_by_name(field: str, junk: Any) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)\b{field} is .*, expected a finite number above"):
        KimiModelConfig.from_hf_json(text_config(**{field: junk}))


@given(field=st.sampled_from(BOOLEANS), junk=st.one_of(st.integers(), st.text(), st.floats()))
def test_junk_in_a_flag_is_refused_by_name(field: str, junk: Any) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)\b{field} is .*, expected true or false"):
        KimiModelConfig.from_hf_json(text_config(**{field: junk}))


@pytest.mark.parametrize("field", [*POSITIVE_INTEGERS, "q_lora_rank", "rms_norm_eps", "routed_scaling_factor"])
def test_a_missing_field_is_named(field: str) -> None:
    json_without = text_config()
    del json_without[field]
    with pytest.raises(ConfigError, match=rf"{field} is missing, expected"):
        KimiModelConfig.from_hf_json(json_without)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_group": 2}, r"topk_group is 2, expected at most n_group \(1\)"),
        ({"n_group": 7}, r"n_group is 7, expected a divisor of n_routed_experts \(384\)"),
        ({"n_group": 384}, r"n_group is 384, expected groups of at least 2"),
        ({"num_experts_per_tok": 385}, "num_experts_per_tok is 385, expected at most the 384"),
        ({"n_group": 48, "num_experts_per_tok": 9}, "num_experts_per_tok is 9, expected at most the 8"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63, expected an even integer"),
        ({"first_k_dense_replace": 62}, "first_k_dense_replace is 62, expected .* at most 61"),
        ({"attention_bias": True}, "attention_bias is True, expected False"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, expected False"),
        ({"attention_bias": 0}, "attention_bias is 0, expected False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', expected 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy', expected 'noaux_tc'"),
        ({"dtype": "int8"}, "dtype is 'int8', expected 'bfloat16' or"),
        ({"model_type": "llama"}, "model_type is 'llama', expected 'kimi_k25' or 'kimi_k2' or 'deepseek_v3'"),
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures is \['LlamaForCausalLM'\], expected"),
        ({"architectures": "DeepseekV3ForCausalLM"}, "architectures is 'Deepseek.*expected a list of strings"),
        (
            {"architectures": ["KimiK25ForConditionalGeneration"]},
            r"architectures is .*which model_type 'kimi_k2' means",
        ),
        ({"eos_token_id": 163840}, "eos_token_id is 163840, expected integers from 0 to 163839"),
        ({"eos_token_id": [1, True]}, "eos_token_id is"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers is 2147483647, expected .* at most 1000"),
        ({"n_routed_experts": 2**31 - 1}, "n_routed_experts is 2147483647, expected .* at most 10000"),
        ({"num_nextn_predict_layers": 2**31 - 1}, "num_nextn_predict_layers is 2147483647, expected .* at most 1000"),
        ({"hidden_size": 2**31}, "hidden_size is 2147483648, expected .* at most 2147483647"),
        ({"hidden_act": "x" * 10_000}, r"hidden_act is 'x{50,100}\.\.\.x{50,100}', expected 'silu'"),
        ({"bos_token_id": -1}, "bos_token_id is -1"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2}},
            "rope_scaling: type is 'longrope', expected 'default' or 'linear' or 'llama3' or 'yarn'",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope_type is 'dynamic'"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling: type is missing"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', expected an object"),
        ({"rope_scaling": {**yarn(), "factor": 0.5}}, "factor is 0.5, expected a finite number of at least 1"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "original_max_position_embeddings is missing"),
        ({"rope_scaling": {**yarn(), "beta_slow": 33}}, r"beta_slow is 33, expected at most beta_fast \(32\)"),
        ({"rope_scaling": {**yarn(), "mscale": -1}}, "mscale is -1"),
        ({"rope_scaling": {**yarn(), "mscale_all_dim": "1"}}, "mscale_all_dim is '1'"),
        ({"rope_scaling": {**yarn(), "truncate": False}}, "truncate is False, expected True"),
        ({"rope_parameters": {**yarn(), "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_interleave": "yes"}, "rope_interleave is 'yes', expected true or false"),
    ],
)
def test_contradictions_and_unsupported_settings_are_named(changes: Json, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KimiModelConfig.from_hf_json(text_config(**changes))


def _int4_with(path: str, value: Any) -> Json:
    quantization = int4_quantization()
    *parents, field = path.split("/")
    place = quantization
    for parent in parents:
        place = place[parent]
    place[field] = value
    return quantization


def _quark_with(field: str, value: Any) -> Json:
    quantization = quark_quantization()
    quantization["global_quant_config"]["weight"][field] = value
    return quantization


def _quark_layer_with(**fields: Any) -> Json:
    layer = quark_quantization()["global_quant_config"]
    return quark_quantization(global_quant_config={**layer, **fields})


MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ("int4", "quantization_config is 'int4', expected an object"),
        (
            {"quant_method": "awq"},
            "quant_method is 'awq', expected 'compressed-tensors' or 'quark' or 'modelopt' or 'fp8'",
        ),
        (
            {"quant_method": "nvfp4"},
            r"quant_method is 'nvfp4', expected .* \(NVFP4 takes expert kernels whose products",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            r"quant_algo is 'NVFP4', expected 'FP8' .* 16 columns wide",
        ),
        (_int4_with("format", "nvfp4-pack-quantized"), r"format is 'nvfp4-pack-quantized', .*\(NVFP4 takes"),
        (
            quark_quantization(global_quant_config={}, layer_quant_config={"*self_attn*": FP8_ROWS}),
            "leaves model.layers.1.mlp.experts.0.gate_proj",
        ),
        (quark_quantization(exclude=["*mlp.experts.*.up_proj"]), "leaves model.layers.1.mlp.experts.0.up_proj"),
        (
            quark_quantization(layer_quant_config={"*.down_proj": FP8_ROWS}),
            "stores model.layers.1.mlp.experts.0.down_proj as fp8 with a scale a row, expected all .* as mxfp4",
        ),
        (
            quark_quantization(global_quant_config=FP8_ROWS),
            r"stores routed experts as fp8 with a scale a row, expected fp8 in square blocks \(another takes",
        ),
        (_quark_with("dtype", "int4"), "dtype is 'int4', expected 'fp4' or 'fp8_e4m3'"),
        (_quark_with("scale_format", "fp8_e4m3"), r"scale_format is 'fp8_e4m3', expected 'e8m0' \(NVFP4 takes"),
        (_quark_with("group_size", 16), "group_size is 16, expected an integer of at least 32"),
        (_quark_with("is_dynamic", True), "is_dynamic is True, expected False"),
        (quark_quantization(kv_cache_quant_config={"*k_proj": {}}), "kv_cache_quant_config is"),
        (quark_quantization(layer_type_quant_config={"Linear": {}}), "layer_type_quant_config is"),
        (quark_quantization(export={"weight_format": "fake_quantized"}), "weight_format is 'fake_quantized'"),
        (quark_quantization(exclude=["re:("]), r"holds 're:\(', expected a regular expression"),
        (
            quark_quantization(
                global_quant_config={
                    **quark_quantization()["global_quant_config"],
                    "input_tensors": {"is_dynamic": False},
                }
            ),
            "input_tensors is .*, expected null, or activations that are rounded as they come",
        ),
        (quark_quantization(softmax_quant_spec={"dtype": "int8"}), "softmax_quant_spec is"),
        (quark_quantization(export={"kv_cache_group": ["*k_proj"]}), "kv_cache_group is .*, expected \\[\\]"),
        (quark_quantization(export={"weight_merge_groups": [["*k"]]}), "weight_merge_groups is .*, expected \\[\\]"),
        (_quark_layer_with(output_tensors={"dtype": "fp4"}), "output_tensors is"),
        (_quark_layer_with(bias={"dtype": "fp4"}), "bias is"),
        (_quark_layer_with(weight=None), "weight is None, expected an object"),
        (_quark_with("qscheme", "per_tensor"), "qscheme is 'per_tensor', expected 'per_group'"),
        (_quark_with("ch_axis", 0), "ch_axis is 0, expected -1 or 1"),
        (
            quark_quantization(global_quant_config={**FP8_ROWS, "weight": {**FP8_ROWS["weight"], "ch_axis": 1}}),
            "ch_axis is 1, expected 0",
        ),
        (MODELOPT | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is"),
        (MODELOPT | {"kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo is"),
        (MODELOPT | {"quantized_layers": {"a": {}}}, "quantized_layers is"),
        ({"fmt": "e4m3"}, "quant_method is missing"),
        (_int4_with("format", "dense"), "format is 'dense', expected 'pack-quantized' or 'mxfp4-pack-quantized'"),
        (_int4_with("format", "float-quantized"), "type is 'int', expected 'float'"),
        (_int4_with("format", "mxfp4-pack-quantized"), "type is 'int', expected 'float'"),
        (
            _int4_with("config_groups/group_1", {}),
            "expected an object with exactly one group, or several of mixed-prec",
        ),
        (_int4_with("quantization_status", "frozen"), "quantization_status is 'frozen'"),
        (
            _int4_with("kv_cache_scheme", {"num_bits": 8}),
            r"kv_cache_scheme is .*, expected null \(nothing else is supported\)",
        ),
        (_int4_with("config_groups", {}), r"config_groups is \{\}, expected an object with exactly one group"),
        (
            _int4_with("config_groups/group_0/targets", ["Embedding"]),
            r"\(targets, ignore\) leaves model.layers.1.mlp.exp",
        ),
        (_int4_with("config_groups/group_0/targets", []), r"targets is \[\], expected"),
        (_int4_with("config_groups/group_0/input_activations", {"num_bits": 8}), "input_activations is"),
        (_int4_with("config_groups/group_0/output_activations", {"num_bits": 8}), "output_activations is"),
        (_int4_with("config_groups/group_0/weights/dynamic", True), "dynamic is True, expected False"),
        (_int4_with("config_groups/group_0/weights", None), "weights is None, expected an object"),
        (_int4_with("config_groups/group_0/weights/num_bits", 8), "num_bits is 8, expected an integer of at least 4"),
        (_int4_with("config_groups/group_0/weights/type", "float"), "type is 'float', expected 'int'"),
        (_int4_with("config_groups/group_0/weights/symmetric", False), "symmetric is False, expected True"),
        (_int4_with("config_groups/group_0/weights/strategy", "channel"), "strategy is 'channel'"),
        (_int4_with("config_groups/group_0/weights/group_size", 12), "group_size is 12, expected a multiple of 8"),
        (_int4_with("config_groups/group_0/weights/group_size", -1), "group_size is -1, expected an integer"),
        (
            _int4_with("config_groups/group_0/weights/group_size", 96),
            "hidden_size is 7168, expected a multiple of .* 96",
        ),
        (_int4_with("config_groups/group_0/weights/actorder", "group"), "actorder is 'group'"),
        (_int4_with("ignore", ["re:("]), r"holds 're:\(', expected a regular expression"),
        (_int4_with("ignore", ["re:a{99999999999999}"]), "holds 're:a.*expected a regular expression"),
        (_int4_with("ignore", ["re:" + "(" * 5000]), r"holds 're:\(+', expected a regular expression"),
        (_int4_with("ignore", "lm_head"), "ignore is 'lm_head', expected a list of strings"),
        (_int4_with("ignore", ["lm_head"]), "quantises model.layers.0.self_attn.q_a_proj to int4, expected routed"),
        (
            _int4_with("ignore", ["re:.*self_attn.*", "re:.*mlp\\.(gate|up|down)_proj.*"]),
            "quantises model.layers.1.mlp.shared_experts.gate_proj to int4",
        ),
        (
            _int4_with("ignore", [*int4_quantization()["ignore"], "re:.*layers.7.mlp.experts.*"]),
            r"\(targets, ignore\) leaves model.layers.7.mlp.experts.0.gate_proj as it is, expected all routed",
        ),
        (fp8_quantization(96), "moe_intermediate_size is 2048, expected a multiple of the fp8 weight_block_size 96"),
        ({**fp8_quantization(), "fmt": "e5m2"}, "fmt is 'e5m2', expected 'e4m3'"),
        ({**fp8_quantization(), "scale_fmt": "int8"}, "scale_fmt is 'int8', expected 'float' or 'ue8m0'"),
        ({**fp8_quantization(), "activation_scheme": "fixed"}, "activation_scheme is 'fixed'"),
        ({**fp8_quantization(), "weight_block_size": None}, "routed experts as fp8 with a scale a matrix, expected"),
        ({**fp8_quantization(), "weight_block_size": [128, 64]}, "weight_block_size is .*expected two equal"),
        ({**fp8_quantization(), "weight_block_size": [0, 0]}, "weight_block_size is"),
        (
            {**fp8_quantization(), "modules_to_not_convert": ["model.layers.3.mlp"]},
            r"\(targets, ignore\) leaves model.layers.3.mlp.exp",
        ),
    ],
)
def test_unsupported_quantization_is_named(quantization: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KimiModelConfig.from_hf_json(text_config(quantization_config=quantization))


def test_quantization_reads_the_names_of_both_prefixes() -> None:
    quantization = int4_quantization()
    quantization["ignore"] = [pattern.replace("re:.*", "re:language_model.*") for pattern in quantization["ignore"]]
    config = KimiModelConfig.from_hf_json(text_config(quantization_config=quantization))
    assert config.quantization.quantizes("model.layers.1.mlp.experts.0.up_proj")
    assert not config.quantization.quantizes("model.layers.1.mlp.shared_experts.up_proj")
    assert not config.quantization.quantizes("lm_head")


def test_fp8_covers_attention_but_not_listed_modules() -> None:
    quantization = {**fp8_quantization(), "modules_to_not_convert": ["model.layers.0"]}
    config = KimiModelConfig.from_hf_json(text_config(quantization_config=quantization)).quantization
    assert config.quantizes("model.layers.1.self_attn.o_proj")
    assert not config.quantizes("model.layers.0.self_attn.o_proj")
    assert config.fp8_block_size == 128


def test_two_quantization_configs_must_agree() -> None:
    changed = copy.deepcopy(kimi_k25())
    changed["quantization_config"]["ignore"] = ["lm_head"]
    with pytest.raises(
        ConfigError, match=r"text_config quantization_config contradicts config.json quantization_config"
    ):
        KimiModelConfig.from_hf_json(changed)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "holds a JSON list, expected an object"),
        (b"\xff\xfe", "not UTF-8"),
        (b"", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (None, "no such file"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Any, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"config\.json.*{message}"):
        KimiModelConfig.from_hf_json(tmp_path)


def test_only_regular_files_are_read(tmp_path: Any) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read \(is no regular file\)"):
        KimiModelConfig.from_hf_json(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(text_config()))
    (tmp_path / "generation_config.json").mkdir()
    with pytest.raises(ConfigError, match=r"generation_config\.json: cannot be read \(Is a directory"):
        KimiModelConfig.from_hf_json(tmp_path)


def test_kv_dtypes_are_checked() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'int3', expected one of float32, bfloat16"):
        KimiModelConfig.from_hf_json(text_config()).kv_bytes_per_token("int3")


def test_int4_files_may_list_the_modules_that_exist() -> None:
    """llm-compressor's exports do so: no pattern covers `q_proj`, which the model does not have."""
    modules = ["lm_head"]
    for layer in range(61):
        parts = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
        modules += [f"model.layers.{layer}.self_attn.{part}" for part in parts]
        mlp = "mlp.shared_experts" if layer else "mlp"
        modules += [f"model.layers.{layer}.{mlp}.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
    config = KimiModelConfig.from_hf_json(text_config(quantization_config=_int4_with("ignore", modules)))
    assert config.quantization.quantizes("model.layers.1.mlp.experts.0.up_proj")
    missing = _int4_with("ignore", [name for name in modules if name != "model.layers.3.self_attn.o_proj"])
    with pytest.raises(ConfigError, match=r"quantises model\.layers\.3\.self_attn\.o_proj to int4"):
        KimiModelConfig.from_hf_json(text_config(quantization_config=missing))
    uncompressed = [name.replace("q_a_proj", "q_proj") for name in modules if "q_b_proj" not in name]
    changes = {"q_lora_rank": None, "quantization_config": _int4_with("ignore", uncompressed)}
    assert KimiModelConfig.from_hf_json(text_config(**changes)).q_lora_rank is None


def test_int4_files_may_name_the_experts_as_targets() -> None:
    quantization = _int4_with("config_groups/group_0/targets", [r"re:.*mlp\.experts\..*"])
    quantization["ignore"] = []
    quantization["config_groups"]["group_0"]["weights"]["actorder"] = "static"
    config = KimiModelConfig.from_hf_json(text_config(quantization_config=quantization)).quantization
    assert config.quantizes("model.layers.1.mlp.experts.0.up_proj")
    assert not config.quantizes("model.layers.1.mlp.shared_experts.up_proj")
    assert not config.quantizes("model.layers.1.self_attn.o_proj")


def test_names_that_other_servers_take() -> None:
    assert KimiModelConfig.from_hf_json(
        text_config(architectures=["KimiK2ForCausalLM"])
    ) == KimiModelConfig.from_hf_json(text_config())
    ue8m0 = {**fp8_quantization(), "scale_fmt": "ue8m0"}
    assert KimiModelConfig.from_hf_json(text_config(quantization_config=ue8m0)).quantization.fp8_block_size == 128


def test_a_pattern_that_does_not_come_to_an_end_is_refused() -> None:
    quantization = _int4_with("ignore", [*int4_quantization()["ignore"], "re:(?:[a-z._0-9]|[a-z._0-9]{2})*(?:#|%)"])
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"'re:.* takes more than 1 s to match"):
        KimiModelConfig.from_hf_json(text_config(quantization_config=quantization))
    assert time.monotonic() - start < PATIENCE_S


def test_quarks_files_say_each_modules_format() -> None:
    """amd/Kimi-K2.5-MXFP4 has 69,303 tensors of scales, of all MLPs; none of attention, router or head."""
    config = KimiModelConfig.from_hf_json(TARGET_FAMILIES["K2.5-MXFP4"])
    specs = target_tensor_specs(config)
    scales = [name for name, spec in specs.items() if spec.role is TensorRole.MXFP4_SCALES]
    assert len(scales) == 69_303
    assert len(specs) == 139_613 - 335  # of its vision tower and projector
    assert sum(".mlp.experts." in name for name in scales) == 69_120
    assert sum(".mlp.shared_experts." in name for name in scales) == 180
    assert sum(".layers.0.mlp." in name for name in scales) == 3
    assert specs["model.layers.1.mlp.experts.0.gate_proj.weight"].shape == (2048, 3584)
    assert specs["model.layers.1.mlp.experts.0.gate_proj.weight_scale"].shape == (2048, 224)
    assert specs["model.layers.1.self_attn.o_proj.weight"].dtypes[0] is torch.bfloat16
    # The file has 558,995,180,568 bytes with its vision tower and projector.
    assert 0 < 558_995_180_568 - sum(spec.num_bytes for spec in specs.values()) < 1.2e9
    assert not config.warnings


def test_attention_of_another_format_than_the_experts() -> None:
    config = KimiModelConfig.from_hf_json(TARGET_FAMILIES["K2.5-MXFP4-AttnFP8"])
    assert config.expert_format.describe() == "mxfp4 in groups of 32"
    specs = target_tensor_specs(config)
    assert specs["model.layers.3.self_attn.o_proj.weight"].dtypes == (torch.float8_e4m3fn,)
    assert specs["model.layers.3.self_attn.o_proj.weight_scale"].shape == (7168,)
    assert not config.warnings


def test_compressed_tensors_mxfp4_and_fp8() -> None:
    specs = target_tensor_specs(KimiModelConfig.from_hf_json(TARGET_FAMILIES["K2.5 mxfp4-pack-quantized"]))
    assert specs["model.layers.1.mlp.experts.0.down_proj.weight_packed"].shape == (7168, 1024)
    assert specs["model.layers.1.mlp.experts.0.down_proj.weight_scale"].dtypes[0] is torch.uint8
    assert specs["model.layers.1.mlp.shared_experts.down_proj.weight"].dtypes[0] is torch.bfloat16
    specs = target_tensor_specs(KimiModelConfig.from_hf_json(TARGET_FAMILIES["K2-Thinking-FP8-Block"]))
    assert specs["model.layers.1.mlp.experts.0.down_proj.weight_scale"].shape == (56, 16)
    assert specs["model.layers.1.self_attn.q_a_proj.weight"].dtypes[0] is torch.bfloat16
