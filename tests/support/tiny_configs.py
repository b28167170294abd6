"""config.json of tiny models, with the fields of real ones."""

from typing import Any

from kimi_backend.config.draft_config import (
    DraftOverrides,
    Eagle3DraftConfig,
    Eagle3MhaDraftConfig,
    Eagle3MlaDraftConfig,
)
from kimi_backend.config.model_config import KimiModelConfig

INT4_GROUP_SIZE = 32
FP8_BLOCK_SIZE = 32
YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
FP4_SPEC = {"dtype": "fp4", "qscheme": "per_group", "ch_axis": -1, "group_size": 32, "scale_format": "e8m0"}
QUANTIZATION_CONFIGS: dict[str, dict[str, Any]] = {
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "type": "int",
                    "num_bits": 4,
                    "strategy": "group",
                    "group_size": INT4_GROUP_SIZE,
                    "symmetric": True,
                    "dynamic": False,
                    "actorder": None,
                },
            }
        },
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        ],
        "kv_cache_scheme": None,
    },
    "mxfp4": {
        "quant_method": "quark",
        "exclude": ["lm_head", "re:.*self_attn.*", r"re:.*mlp\.gate$"],
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        "global_quant_config": {
            "weight": {**FP4_SPEC, "is_dynamic": False},
            "input_tensors": {**FP4_SPEC, "is_dynamic": True},
            "output_tensors": None,
        },
        "layer_quant_config": {},
    },
    # As AMD's AttnFP8 files: attention in fp8 with a scale a row.
    "mxfp4 and fp8": {
        "quant_method": "quark",
        "exclude": ["lm_head", r"re:.*mlp\.gate$"],
        "global_quant_config": {"weight": FP4_SPEC},
        "layer_quant_config": {
            "*self_attn*": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0}},
        },
    },
    "mxfp4 packed": {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "format": "mxfp4-pack-quantized",
                "targets": [r"re:.*mlp\.experts\..*_proj$"],
                "weights": {
                    "type": "float",
                    "num_bits": 4,
                    "strategy": "group",
                    "group_size": 32,
                    "symmetric": True,
                    "scale_dtype": "torch.uint8",
                },
            },
            "group_1": {
                "format": "float-quantized",
                "targets": ["re:.*self_attn.*"],
                "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
                "weights": {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True},
            },
        },
        "ignore": ["lm_head"],
    },
    "fp8": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK_SIZE, FP8_BLOCK_SIZE],
    },
}


HOPPER_WIDTHS = {
    "num_attention_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_size": 256,
}
"""Kimi-K2's widths of attention, which Hopper's kernels are for, in a model that is small otherwise."""


def target_json(quantization: str = "none", **fields: Any) -> dict[str, Any]:
    """A tiny target's config.json. `fields` replace or add entries."""
    config: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": dict(YARN),
        "vocab_size": 96,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "eos_token_id": 1,
        "bos_token_id": 0,
        "pad_token_id": 2,
        "dtype": "float32",
    }
    if quantization != "none":
        config["quantization_config"] = QUANTIZATION_CONFIGS[quantization]
    config |= fields
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    return config


def target_config(quantization: str = "none", **fields: Any) -> KimiModelConfig:
    return KimiModelConfig.from_hf_json(target_json(quantization, **fields))


def draft_json(kind: str, **fields: Any) -> dict[str, Any]:
    """A tiny draft's config.json. kind: "mla", "mla31" (EAGLE3.1) or "mha"."""
    eagle: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}
    config: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
        "vocab_size": 96,
        "draft_vocab_size": 96,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "dtype": "float32",
        "eagle_config": eagle,
    }
    if kind == "mha":
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "rope_theta": 1000000.0}
        config |= {"num_key_value_heads": 2, "head_dim": 16}
        return {**config, **fields}
    config |= {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "rope_theta": 50000.0}
    config |= {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
    config["rope_scaling"] = dict(YARN)
    if kind == "mla31":
        eagle |= {"fc_norm": True, "norm_output": True}
    return {**config, **fields}


def draft_config(
    kind: str, target: KimiModelConfig, overrides: DraftOverrides | None = None, **fields: Any
) -> Eagle3MlaDraftConfig | Eagle3MhaDraftConfig:
    return Eagle3DraftConfig.from_hf_json(draft_json(kind, **fields), target, overrides or DraftOverrides())
