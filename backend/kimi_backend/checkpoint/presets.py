"""config.json contents of models that `kimi make-checkpoint` can make, in the spelling of the public checkpoints."""

import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kimi_backend.config.aux_layers import AUX_LAYER_IDS_FIELD, ENCODING_FIELD
from kimi_backend.config.draft_fields import MHA_ARCHITECTURE, MLA_ARCHITECTURE
from kimi_backend.config.model_config import MULTIMODAL_ARCHITECTURE, TEXT_ARCHITECTURE
from kimi_backend.config.quantization_config import QuantizationMethod

Json = dict[str, Any]

INT4_GROUP_SIZE = 32
MXFP4_GROUP_SIZE = 32
FP8_BLOCK_SIZE = 128


class Preset(str, Enum):
    """Size of the model."""

    TINY = "tiny"
    """Seconds on a CPU; every feature of the large one."""
    KIMI_K25 = "kimi-k2.5"
    """Full width; the number of layers decides what it weighs."""


class Architecture(str, Enum):
    """Layout of config.json and of the weights' names."""

    KIMI_K25 = "kimi-k2.5"
    """Nested text_config, weights under `language_model.`."""
    DEEPSEEK_V3 = "deepseek-v3"
    """The shapes of DeepSeek-V3, on which Kimi-K2 is built."""


class DraftKind(str, Enum):
    """Kind of draft beside the target."""

    MLA = "mla"
    """EAGLE3."""
    MLA31 = "mla31"
    """EAGLE3.1: fc_norm and norm_output."""
    MHA = "mha"
    """EAGLE3 with Llama's attention and a reduced vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    text: Json
    yarn: Json
    draft_vocab_size: int
    draft_heads: Json
    default_layers: int
    attention_fields: tuple[str, ...] = field(
        default=(
            "num_attention_heads",
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        )
    )


_PRESETS = {
    Preset.KIMI_K25: _Sizes(
        text={
            "hidden_size": 7168,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 384,
            "num_experts_per_tok": 8,
            "vocab_size": 163840,
            "max_position_embeddings": 262144,
        },
        yarn={"factor": 64.0, "original_max_position_embeddings": 4096},
        draft_vocab_size=32000,
        draft_heads={"num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 128},
        default_layers=2,
    ),
    Preset.TINY: _Sizes(
        text={
            "hidden_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 64,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "intermediate_size": 256,
            "moe_intermediate_size": 256,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "vocab_size": 2048,
            "max_position_embeddings": 4096,
        },
        yarn={"factor": 4.0, "original_max_position_embeddings": 1024},
        draft_vocab_size=512,
        draft_heads={"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
        default_layers=4,
    ),
}

_FAMILY: Json = {
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_nextn_predict_layers": 0,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
}

_INT4_CONFIG: Json = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "type": "int",
                "num_bits": 4,
                "symmetric": True,
                "strategy": "group",
                "group_size": INT4_GROUP_SIZE,
                "observer": "minmax",
                "actorder": None,
                "dynamic": False,
            },
        }
    },
}
_FP8_CONFIG: Json = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [FP8_BLOCK_SIZE, FP8_BLOCK_SIZE],
}
_FP4_SPEC: Json = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "ch_axis": -1,
    "group_size": MXFP4_GROUP_SIZE,
    "scale_format": "e8m0",
    "scale_type": "float",
    "observer_cls": "PerBlockMXObserver",
    "round_method": "half_even",
}
_MXFP4_CONFIG: Json = {
    "quant_method": "quark",
    "quant_mode": "eager_mode",
    "exclude": ["lm_head", "re:.*self_attn.*", "re:.*mlp\\.gate$", "re:.*(vision_tower|mm_projector).*"],
    "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
    "global_quant_config": {
        "weight": {**_FP4_SPEC, "is_dynamic": False},
        "input_tensors": {**_FP4_SPEC, "is_dynamic": True},
        "output_tensors": None,
        "bias": None,
    },
    "layer_quant_config": {},
    "layer_type_quant_config": {},
}
"""The modules that AMD's files for Kimi keep in bf16: attention, router and head. All MLPs are MXFP4."""
_QUANTIZATION_CONFIGS = {
    QuantizationMethod.INT4: _INT4_CONFIG,
    QuantizationMethod.FP8: _FP8_CONFIG,
    QuantizationMethod.MXFP4: _MXFP4_CONFIG,
}


def default_num_layers(preset: Preset) -> int:
    return _PRESETS[preset].default_layers


def vocab_size(preset: Preset) -> int:
    return int(_PRESETS[preset].text["vocab_size"])


def max_model_len(preset: Preset) -> int:
    return int(_PRESETS[preset].text["max_position_embeddings"])


def target_config_json(
    preset: Preset,
    num_layers: int,
    quantization: QuantizationMethod,
    architecture: Architecture,
    token_ids: Json,
) -> Json:
    """A target's config.json.

    Args:
        token_ids: the tokenizer's bos_token_id, eos_token_id, pad_token_id, …, at the top level as in K2.5.
    """
    text: Json = {
        "architectures": [TEXT_ARCHITECTURE],
        "model_type": "kimi_k2",
        **_PRESETS[preset].text,
        **_FAMILY,
        "num_hidden_layers": num_layers,
        "rope_scaling": _rope_scaling(preset),
    }
    top: Json = {**token_ids, "tie_word_embeddings": False, "dtype": "bfloat16"}
    if quantization is not QuantizationMethod.NONE:
        text["quantization_config"] = copy.deepcopy(_QUANTIZATION_CONFIGS[quantization])
    if architecture is Architecture.DEEPSEEK_V3:
        return {**text, **top}
    if quantization is not QuantizationMethod.NONE:
        top["quantization_config"] = copy.deepcopy(_QUANTIZATION_CONFIGS[quantization])
    return {"architectures": [MULTIMODAL_ARCHITECTURE], "model_type": "kimi_k25", **top, "text_config": text}


def draft_config_json(kind: DraftKind, preset: Preset, num_target_layers: int) -> Json:
    """The config.json of a draft for `target_config_json` of the same preset."""
    sizes = _PRESETS[preset]
    draft: Json = {
        "hidden_size": sizes.text["hidden_size"],
        "intermediate_size": sizes.text["intermediate_size"],
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_theta": 50000.0,
        "rope_scaling": _rope_scaling(preset),
        "vocab_size": sizes.text["vocab_size"],
        "max_position_embeddings": sizes.text["max_position_embeddings"],
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "eagle_config": _eagle_config(num_target_layers),
    }
    if kind is DraftKind.MHA:
        heads = {**sizes.draft_heads, "draft_vocab_size": sizes.draft_vocab_size}
        return {"architectures": [MHA_ARCHITECTURE], "model_type": "llama", **draft, **heads}
    attention = {name: sizes.text[name] for name in sizes.attention_fields}
    draft |= {**attention, "draft_vocab_size": sizes.text["vocab_size"]}
    if kind is DraftKind.MLA31:
        draft |= {"fc_norm": True, "norm_output": True}
    return {"architectures": [MLA_ARCHITECTURE], "model_type": "kimi_k2", **draft}


def _rope_scaling(preset: Preset) -> Json:
    return {
        "type": "yarn",
        **_PRESETS[preset].yarn,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


def _eagle_config(num_target_layers: int) -> Json:
    """Aux layers; a target too shallow for 2, N // 2, N - 3 says how its ids count."""
    ids = [2, num_target_layers // 2, num_target_layers - 3]
    if num_target_layers >= 7:
        return {AUX_LAYER_IDS_FIELD: ids, "use_aux_hidden_state": True}
    ids = sorted({0, num_target_layers // 2, num_target_layers})
    return {AUX_LAYER_IDS_FIELD: ids, ENCODING_FIELD: "input", "use_aux_hidden_state": True}
