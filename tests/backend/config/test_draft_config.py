"""Draft configs: every family parses to its documented numbers; aux encodings; overrides; junk refused by name."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_backend.config.draft_config import (
    DraftOverrides,
    Eagle3DraftConfig,
    Eagle3MhaDraftConfig,
    Eagle3MlaDraftConfig,
)
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.errors import ConfigError
from support.family_configs import (
    DRAFT_FAMILIES,
    Json,
    int4_quantization,
    kimi_k25,
    mha_draft,
    mla_draft,
    text_config,
    yarn,
)

TARGET = KimiModelConfig.from_hf_json(kimi_k25())


def parse(
    draft: Json, overrides: DraftOverrides | None = None, target: KimiModelConfig = TARGET
) -> Eagle3MlaDraftConfig | Eagle3MhaDraftConfig:
    return Eagle3DraftConfig.from_hf_json(draft, target, overrides or DraftOverrides())


@pytest.mark.parametrize("family", DRAFT_FAMILIES)
def test_every_family_reads_the_same_target_states(family: str) -> None:
    config = parse(DRAFT_FAMILIES[family])
    assert config.aux_layer_ids == (2, 30, 58)
    assert config.num_aux_hidden_states == 3
    assert config.target_hidden_size == 7168
    assert not config.norm_before_residual


def test_mla_families() -> None:
    plain, revised = parse(DRAFT_FAMILIES["k2.5-eagle3-mla"]), parse(DRAFT_FAMILIES["k2.6-eagle3.1-mla"])
    assert isinstance(plain, Eagle3MlaDraftConfig)
    assert plain.kv_bytes_per_token("bfloat16") == 1_152
    assert plain.kv_bytes_per_token("float8_e4m3fn", tp_size=8) == 576
    assert plain.softmax_scale == pytest.approx(0.144680, abs=5e-7)
    assert plain.rope.interleaved
    assert (plain.fc_norm, plain.norm_output) == (False, False)
    assert revised == replace(plain, fc_norm=True, norm_output=True)
    assert parse(DRAFT_FAMILIES["k2.7-coder-eagle3.1-mla"]) == revised
    assert parse(DRAFT_FAMILIES["nvidia (MLA, empty ids)"]).rope == replace(plain.rope, beta_fast=1.0)


def test_mha_families() -> None:
    full, reduced = parse(DRAFT_FAMILIES["k2.5-eagle3 (MHA)"]), parse(DRAFT_FAMILIES["AQ-MedAI K25 (MHA, 32k)"])
    assert isinstance(full, Eagle3MhaDraftConfig)
    assert full.kv_bytes_per_token("bfloat16") == 32_768
    assert full.kv_bytes_per_token("bfloat16", tp_size=8) == 4_096
    assert full.softmax_scale == pytest.approx(128**-0.5)
    assert not full.rope.interleaved
    assert (full.rope.theta, full.dtype, full.sliding_window) == (1e6, "float16", None)
    assert (full.draft_vocab_size, reduced.draft_vocab_size) == (163840, 32000)


def test_mha_defaults_follow_the_head_count() -> None:
    draft = mha_draft([2, 30, 58], sliding_window=2048, num_key_value_heads=None, head_dim=None)
    config = parse(draft)
    assert isinstance(config, Eagle3MhaDraftConfig)
    assert (config.num_key_value_heads, config.head_dim, config.sliding_window) == (64, 112, 2048)


@pytest.mark.parametrize("make", [mla_draft, mha_draft])
def test_absent_fields_of_a_draft_have_their_defaults(make: Callable[..., Json]) -> None:
    defaults = {
        "num_hidden_layers": 1,
        "vocab_size": 163840,
        "draft_vocab_size": 163840,
        "norm_output": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "rope_theta": 10000.0,
        "rope_interleave": make is mla_draft,
    }
    said = make([2, 30, 58], **defaults)
    absent = {name: value for name, value in said.items() if name not in defaults}
    assert parse(absent) == parse(said)


def test_a_missing_draft_vocabulary_is_the_targets() -> None:
    assert parse(mla_draft([2, 30, 58], draft_vocab_size=None)).draft_vocab_size == 163840


def test_transformers_5_rope_parameters() -> None:
    draft = mla_draft([2, 30, 58])
    scaling = draft.pop("rope_scaling")
    draft["rope_parameters"] = {"rope_theta": draft.pop("rope_theta"), "rope_type": scaling.pop("type"), **scaling}
    assert parse(draft) == parse(mla_draft([2, 30, 58]))


@pytest.mark.parametrize("field", ["fc_norm", "norm_output", "norm_before_residual"])
def test_flags_stand_nested_or_at_the_top(field: str) -> None:
    for draft in (mla_draft([2, 30, 58], **{field: True}), mla_draft([2, 30, 58], eagle_config={field: True})):
        assert getattr(parse(draft), field) is True
    with pytest.raises(ConfigError, match=f"{field} is True, expected False as at the top level"):
        parse(mla_draft([2, 30, 58], eagle_config={field: True}, **{field: False}))


def test_fc_norm_has_an_older_name() -> None:
    assert parse(mla_draft([2, 30, 58], use_aux_norm=True)).fc_norm
    with pytest.raises(ConfigError, match="fc_norm is False, expected True as its older name use_aux_norm"):
        parse(mla_draft([2, 30, 58], use_aux_norm=True, fc_norm=False))


@pytest.mark.parametrize(
    ("listed", "resolved"),
    [
        (None, (2, 30, 58)),
        ([], (2, 30, 58)),
        ([1, 29, 57], (2, 30, 58)),
        ([2, 30, 58], (2, 30, 58)),
        ([2, 30, 61], (2, 30, 61)),
        ([1, 29, 60], (2, 30, 61)),
        ([2], (2,)),
        ([1, 3, 5, 7], (2, 4, 6, 8)),
    ],
)
def test_aux_encodings(listed: list[int] | None, resolved: tuple[int, ...]) -> None:
    assert parse(mla_draft(listed)).aux_layer_ids == resolved
    at_the_top = mla_draft(eagle_aux_hidden_state_layer_ids=listed)
    assert parse(at_the_top).aux_layer_ids == resolved


@pytest.mark.parametrize(
    ("encoding", "listed", "resolved"),
    [("input", [0, 1, 2], (0, 1, 2)), ("output", [0, 1, 2], (1, 2, 3)), ("input", [1, 29, 57], (1, 29, 57))],
)
def test_a_named_encoding_wins_over_the_first_id(encoding: str, listed: list[int], resolved: tuple[int, ...]) -> None:
    draft = mla_draft(listed, eagle_config={"aux_layer_id_encoding": encoding})
    assert parse(draft).aux_layer_ids == resolved


@given(
    num_layers=st.integers(7, 100),
    rest=st.sets(st.integers(3, 99), max_size=4),
    first=st.sampled_from([1, 2]),
)
def test_both_encodings_of_the_same_states_agree(num_layers: int, rest: set[int], first: int) -> None:
    target = KimiModelConfig.from_hf_json(text_config(num_hidden_layers=num_layers))
    states = (2, *sorted(j for j in rest if j <= num_layers))
    listed = [j - (2 - first) for j in states]
    assert parse(mla_draft(listed), target=target).aux_layer_ids == states
    assert parse(mla_draft([]), target=target).aux_layer_ids == (2, num_layers // 2, num_layers - 3)


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ([2, 58, 30], r"layer_ids is \[2, 58, 30\], meaning .*\[2, 58, 30\]; expected rising layers from 0 to 61"),
        ([2, 2, 58], r"layer_ids is \[2, 2, 58\]"),
        ([2, 30, 62], r"layer_ids is \[2, 30, 62\], .* from 0 to 61"),
        ([1, 29, 61], r"layer_ids is \[1, 29, 61\], meaning .*\[2, 30, 62\]"),
        ([-1, 2], r"layer_ids is \[-1, 2\], expected integers from 0"),
        ([True, 2], r"layer_ids is \[True, 2\], expected integers"),
        (["2"], r"layer_ids is \['2'\], expected integers"),
        ({"a": 1}, "layer_ids is .*expected integers"),
    ],
)
def test_bad_aux_lists_are_named(listed: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(mla_draft(listed))


def test_a_shallow_target_has_no_default() -> None:
    target = KimiModelConfig.from_hf_json(text_config(num_hidden_layers=6))
    with pytest.raises(ConfigError, match="a target of 6 layers has no default"):
        parse(mla_draft(), target=target)
    assert parse(mla_draft(), DraftOverrides(aux_layer_ids=(0, 6)), target).aux_layer_ids == (0, 6)


def test_overrides_win_over_the_file() -> None:
    overrides = DraftOverrides(
        rope_theta=10000.0,
        beta_fast=1.0,
        interleaved=False,
        fc_norm=True,
        norm_output=True,
        aux_layer_ids=(3, 31, 59),
    )
    config, file = parse(mla_draft([2, 30, 58]), overrides), parse(mla_draft([2, 30, 58]))
    assert config == replace(
        file,
        rope=replace(file.rope, theta=10000.0, beta_fast=1.0, interleaved=False),
        fc_norm=True,
        norm_output=True,
        aux_layer_ids=(3, 31, 59),
    )
    overridden = parse(mla_draft([0, 1, 2]), DraftOverrides(aux_layer_ids=(2, 30, 58)))
    assert overridden.aux_layer_ids == (2, 30, 58)
    assert (overridden.aux_layer_rule, overridden.warnings) == ("set by the operator", ())
    assert not parse(mla_draft([2, 30, 58], fc_norm=True), DraftOverrides(fc_norm=False)).fc_norm


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_theta", 1.0),
        ("rope_theta", math.nan),
        ("rope_theta", math.inf),
        ("rope_theta", "1e6"),
        ("rope_theta", True),
        ("beta_fast", 0.0),
        ("beta_fast", math.inf),
        ("beta_fast", "32"),
        ("interleaved", 1),
        ("fc_norm", "true"),
        ("norm_output", 0),
        ("aux_layer_ids", ("2",)),
        ("aux_layer_ids", (True,)),
        ("aux_layer_ids", ()),
        ("aux_layer_ids", (2, 1)),
        ("aux_layer_ids", (2, 62)),
        ("beta_fast", 0.5),
    ],
)
def test_bad_overrides_are_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"draft override {field} is"):
        parse(mla_draft([2, 30, 58]), DraftOverrides(**{field: value}))


def test_beta_fast_needs_yarn() -> None:
    with pytest.raises(ConfigError, match=r"beta_fast is 1\.0, expected none: the draft's rope is not yarn"):
        parse(mha_draft([2, 30, 58]), DraftOverrides(beta_fast=1.0))


SHARED_INTEGERS = ["hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings", "vocab_size"]
MLA_INTEGERS = ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank"]
MHA_INTEGERS = ["num_key_value_heads", "head_dim"]
JUNK = st.one_of(
    st.integers(max_value=0), st.booleans(), st.floats(), st.text(max_size=4), st.lists(st.integers(), max_size=2)
)


@given(field=st.sampled_from([*SHARED_INTEGERS, *MLA_INTEGERS, "draft_vocab_size", "target_hidden_size"]), junk=JUNK)
def test_junk_in_an_mla_draft_is_refused_by_name(field: str, junk: Any) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)\b{field} is .*, expected an integer of at least 1"):
        parse(mla_draft([2, 30, 58], **{field: junk}))


@given(field=st.sampled_from([*SHARED_INTEGERS, *MHA_INTEGERS, "draft_vocab_size", "num_aux_hidden_states"]), junk=JUNK)
def test_junk_in_an_mha_draft_is_refused_by_name(field: str, junk: Any) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)\b{field} is .*, expected an integer of at least 1"):
        parse(mha_draft([2, 30, 58], **{field: junk}))


@given(
    field=st.sampled_from(["fc_norm", "use_aux_norm", "norm_output", "norm_before_residual", "rope_interleave"]),
    junk=st.one_of(st.integers(), st.floats(), st.text(max_size=4)),
)
def test_junk_in_a_flag_is_refused_by_name(field: str, junk: Any) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)\b{field} is .*, expected true or false"):
        parse(mla_draft([2, 30, 58], **{field: junk}))


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (mla_draft(architectures=["LlamaForCausalLM"]), r"architectures is \['LlamaForCausalLM'\], expected"),
        (mla_draft(architectures=None), "architectures is None, expected"),
        (mla_draft(eagle_config=[1]), r"eagle_config is \[1\], expected an object"),
        (mla_draft([2, 30, 58], eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state is False, expec"),
        (mla_draft(use_aux_hidden_state=False), "use_aux_hidden_state is False, expected True"),
        (mla_draft(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (mla_draft(num_hidden_layers=17), "num_hidden_layers is 17, expected an integer of at least 1 and at most 16"),
        (mla_draft(norm_before_fc=True, fc_norm=True), "norm_before_fc is True, expected False beside fc_norm"),
        (mla_draft(quantization_config={"quant_method": "modelopt"}), "quant_algo is missing, expected 'FP8'"),
        (mla_draft(quantization_config=int4_quantization()), r"expected none, fp8 or mxfp4 \(int4 takes its unpacking"),
        (mla_draft(mla_use_nope=True), r"mla_use_nope is True, expected False \(another value takes attention without"),
        (mla_draft([2], eagle_config={"use_last_layernorm": False}), "use_last_layernorm is False, expected True"),
        (mla_draft([2], eagle_config={"parallel_draft_step": 2}), "eagle_config: parallel_draft_step is 2, expected 1"),
        (mla_draft(use_mtp_layernorm=True), "use_mtp_layernorm is True, expected False"),
        (mla_draft(use_moe=True), r"use_moe is True, expected False \(another value takes routed experts"),
        (mha_draft(num_experts=128), "num_experts is 128, expected null"),
        (mha_draft(sliding_window=-2), "sliding_window is -2, expected an integer of at least 1"),
        (mha_draft(sliding_window=4, layer_types=["linear"]), "layer_types is .*, expected 'full_attention' or"),
        (
            mha_draft(num_hidden_layers=2, sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
            "sliding_window is 4, expected a window of all layers or of none",
        ),
        (mha_draft(speculators_model_type="dflash"), "speculators_model_type is 'dflash', expected 'eagle3'"),
        (mla_draft(vocab_size=129280), "vocab_size is 129280, expected 163840, the target's"),
        (mla_draft(draft_vocab_size=163841), "draft_vocab_size is 163841, expected .* at most 163840"),
        (mla_draft(hidden_size=4096), "hidden_size is 4096, expected 7168, the target's hidden_size; a draft of"),
        (mla_draft(target_hidden_size=4096), "target_hidden_size is 4096, expected 7168, the target's"),
        (mla_draft([2, 30, 58], num_aux_hidden_states=4), "num_aux_hidden_states is 4, expected 3, the number of aux"),
        (mla_draft(rope_scaling={**yarn(), "type": "dynamic"}), "type is 'dynamic', expected 'default' or 'linear'"),
        (mla_draft(qk_rope_head_dim=33), "qk_rope_head_dim is 33, expected an even integer"),
        (mla_draft(rms_norm_eps=0), "rms_norm_eps is 0, expected a finite number above 0"),
        (mla_draft(torch_dtype="float64"), "torch_dtype is 'float64'"),
        (mha_draft(head_dim=127), "head_dim is 127, expected an even integer"),
        (
            mha_draft(num_key_value_heads=7),
            r"num_key_value_heads is 7, expected a divisor of num_attention_heads \(64\)",
        ),
        (
            mha_draft(head_dim=None, num_attention_heads=60),
            r"num_attention_heads is 60, expected a divisor of hidden_size",
        ),
        ({k: v for k, v in mla_draft().items() if k != "q_lora_rank"}, "q_lora_rank is missing, expected"),
        ({k: v for k, v in mha_draft().items() if k != "intermediate_size"}, "intermediate_size is missing"),
    ],
)
def test_unsupported_and_contradictory_drafts_are_named(draft: Json, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(draft)


def test_a_draft_may_be_narrower_than_its_target() -> None:
    config = parse(mla_draft([2, 30, 58], hidden_size=4096, target_hidden_size=7168))
    assert (config.hidden_size, config.target_hidden_size) == (4096, 7168)


def test_a_draft_may_leave_its_queries_uncompressed() -> None:
    config = parse(mla_draft([2, 30, 58], q_lora_rank=None))
    assert isinstance(config, Eagle3MlaDraftConfig)
    assert config.q_lora_rank is None


@pytest.mark.parametrize("listed", [[0, 30, 58], [3, 30, 58], [5]])
def test_ambiguous_aux_lists_are_layer_inputs_with_a_warning(listed: list[int]) -> None:
    config = parse(mla_draft(listed))
    assert config.aux_layer_ids == tuple(listed)
    (warning,) = config.warnings
    assert "taken as layer inputs" in warning and "kimi probe" in warning


def test_the_rule_of_the_aux_layers_is_told() -> None:
    rules = {
        "layer outputs, as the first id says, [1, 29, 57]": [1, 29, 57],
        "layer inputs, [2, 30, 58]": [2, 30, 58],
        "the default, since the file lists none": [],
    }
    assert {parse(mla_draft(listed)).aux_layer_rule for listed in rules.values()} == rules.keys()


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"sliding_window": 512}, 512),
        ({"sliding_window": 512, "use_sliding_window": True}, 512),
        ({"sliding_window": 512, "use_sliding_window": False}, None),
        ({"sliding_window": 512, "model_type": "qwen2"}, None),
        ({"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 28}, None),
        ({"sliding_window": 512, "max_window_layers": 28}, 512),
        ({"sliding_window": 512, "layer_types": ["sliding_attention"]}, 512),
        ({"sliding_window": 512, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": -1}, None),
        ({"sliding_window": 0}, None),
        ({"sliding_window": None}, None),
    ],
)
def test_when_a_draft_has_a_window(fields: Json, window: int | None) -> None:
    config = parse(mha_draft([2, 30, 58], **fields))
    assert isinstance(config, Eagle3MhaDraftConfig)
    assert (config.sliding_window, config.warnings) == (window, ())


@pytest.mark.parametrize(("positions", "is_told"), [(4096, True), (131072, True), (262144, False), (None, False)])
def test_the_target_decides_how_long_sequences_are(positions: int | None, is_told: bool) -> None:
    config = parse(mla_draft([2, 30, 58], max_position_embeddings=positions))
    assert (config.max_position_embeddings, config.trained_positions) == (262144, positions)
    assert bool(config.warnings) is is_told
    assert not is_told or f"max_position_embeddings is {positions}, the target's is 262144" in config.warnings[0]


def test_a_field_that_nobody_knows_is_told_by_name() -> None:
    draft = mla_draft([2, 30, 58], eagle_config={"drift": 0.5}, new_norm="l2", initializer_range=0.02)
    assert parse(draft).warnings == (
        "draft config.json: this server does not know and ignores new_norm 'l2'",
        "draft config.json eagle_config: this server does not know and ignores drift 0.5",
    )
    target = KimiModelConfig.from_hf_json(kimi_k25(new_router=True))
    assert target.warnings == ("config.json text_config: this server does not know and ignores new_router True",)
    assert TARGET.warnings == ()


@pytest.mark.parametrize("name", ["Eagle3DeepseekV3ForCausalLM"])
def test_other_names_of_the_mla_draft(name: str) -> None:
    assert parse(mla_draft([2, 30, 58], architectures=[name])) == parse(mla_draft([2, 30, 58]))


def test_other_names_of_the_mha_draft() -> None:
    plain = parse(mha_draft([2, 30, 58]))
    assert parse(mha_draft([2, 30, 58], architectures=["Eagle3LlamaForCausalLM"])) == plain


def speculators(**changes: Any) -> Json:
    """The layout of the speculators library."""
    layer = mha_draft(rope_scaling=None)
    del layer["architectures"], layer["draft_vocab_size"]
    return {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": 32000,
        "norm_before_residual": False,
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "a/b"}},
        "speculators_version": "0.3.0",
        "target_hidden_size": None,
        "torch_dtype": "float16",
        "transformer_layer_config": layer,
        **changes,
    }


def test_the_speculators_layout() -> None:
    config, plain = parse(speculators()), parse(mha_draft(draft_vocab_size=32000))
    assert (config, config.warnings) == (plain, ())
    flags = parse(speculators(norm_before_residual=True, norm_output=True, eagle_aux_hidden_state_layer_ids=[2, 9]))
    assert (flags.norm_before_residual, flags.norm_output, flags.aux_layer_ids) == (True, True, (2, 9))
    silent = parse(speculators(norm_before_residual=None))
    assert silent.norm_before_residual and "norm_before_residual is missing; true is taken" in silent.warnings[0]
    with pytest.raises(ConfigError, match="transformer_layer_config is None, expected an object"):
        parse(speculators(transformer_layer_config=None))


def test_an_empty_quantization_config_is_none() -> None:
    assert parse(mla_draft([2, 30, 58], quantization_config={})) == parse(mla_draft([2, 30, 58]))
    assert KimiModelConfig.from_hf_json(text_config(quantization_config={})) == KimiModelConfig.from_hf_json(
        text_config()
    )
