"""config.json contents of the public checkpoints, from their published fields."""

import copy
from typing import Any

Json = dict[str, Any]

INT4_IGNORE = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
]


def int4_quantization(group_size: int = 32) -> Json:
    """Native int4 of K2-Thinking, K2.5, K2.6."""
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": list(INT4_IGNORE),
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
                    "group_size": group_size,
                    "observer": "minmax",
                    "actorder": None,
                    "dynamic": False,
                },
            }
        },
    }


def fp8_quantization(block_size: int = 128) -> Json:
    """Block fp8 of K2-Instruct."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block_size, block_size],
    }


def quark_quantization(**fields: Any) -> Json:
    """MXFP4 of amd/Kimi-K2.5-MXFP4, which names its 530 excluded modules; here without the vision tower's."""
    fp4 = {
        "dtype": "fp4",
        "qscheme": "per_group",
        "ch_axis": -1,
        "group_size": 32,
        "block_size": None,
        "scale_format": "e8m0",
        "scale_type": "float",
        "scale_calculation_mode": "even",
        "observer_cls": "PerBlockMXObserver",
        "round_method": "half_even",
        "is_scale_quant": False,
        "symmetric": None,
        "mx_element_dtype": None,
    }
    exclude = ["language_model.lm_head"]
    for layer in range(61):
        prefix = f"language_model.model.layers.{layer}"
        parts = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
        exclude += [f"{prefix}.self_attn.{part}" for part in parts]
        exclude += [f"{prefix}.mlp.gate"] if layer else []
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "version": "0.11",
        "algo_config": None,
        "exclude": exclude,
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
        "global_quant_config": {
            "bias": None,
            "input_tensors": {**fp4, "is_dynamic": True},
            "output_tensors": None,
            "target_device": None,
            "weight": {**fp4, "is_dynamic": False},
        },
        "kv_cache_post_rope": False,
        "kv_cache_quant_config": {},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "softmax_quant_spec": None,
        **fields,
    }


FP8_ROWS = {
    "weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False},
    "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True},
    "output_tensors": None,
    "bias": None,
}
"""Quark's ptpc_fp8: a scale a row of the weight."""


def mxfp4_quantization() -> Json:
    """MXFP4 of compressed-tensors: routed experts alone, as llm-compressor writes them."""
    fp4 = {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": list(INT4_IGNORE),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "mxfp4-pack-quantized",
                "input_activations": {**fp4, "dynamic": True, "scale_dtype": "torch.uint8"},
                "output_activations": None,
                "weights": {**fp4, "dynamic": False, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"},
            }
        },
    }


def fp8_block_quantization() -> Json:
    """fp8 of llm-compressor's scheme FP8_BLOCK, as its example for K2-Thinking writes it."""
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["re:.*gate$", "lm_head", "re:.*kv_a_proj_with_mqa$", "re:.*q_a_proj$", "model.embed_tokens"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": {
                    "type": "float",
                    "num_bits": 8,
                    "strategy": "group",
                    "group_size": 128,
                    "dynamic": True,
                },
                "weights": {
                    "type": "float",
                    "num_bits": 8,
                    "strategy": "block",
                    "block_structure": [128, 128],
                    "symmetric": True,
                    "dynamic": False,
                },
            }
        },
    }


def yarn(factor: float = 64.0, beta_fast: float = 32.0) -> Json:
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "beta_fast": beta_fast,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


def text_config(**changes: Any) -> Json:
    """K2.5's text_config without quantisation."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
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
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
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
        "rope_theta": 50000.0,
        "rope_scaling": yarn(),
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
        "num_nextn_predict_layers": 0,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "ep_size": 1,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        **changes,
    }


def kimi_k25(**text_changes: Any) -> Json:
    """K2.5 (and K2.6): nested text_config, int4 experts."""
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "bos_token_id": 163584,
        "eos_token_id": 163585,
        "pad_token_id": 163839,
        "ignore_index": -100,
        "media_placeholder_token_id": 163605,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "text_config": text_config(quantization_config=int4_quantization(), **text_changes),
        "vision_config": {"vt_hidden_size": 1152},
        "quantization_config": int4_quantization(),
    }


def kimi_k25_of(quantization: Json) -> Json:
    """K2.5 in another format."""
    config = kimi_k25()
    config["text_config"]["quantization_config"] = copy.deepcopy(quantization)
    return {**config, "quantization_config": quantization}


def kimi_k2_instruct(max_position: int = 131072, factor: float = 32.0) -> Json:
    return text_config(
        max_position_embeddings=max_position,
        rope_scaling=yarn(factor, beta_fast=1.0),
        rms_norm_eps=1e-6,
        torch_dtype="bfloat16",
        quantization_config=fp8_quantization(),
    )


def kimi_k2_thinking() -> Json:
    return text_config(rope_scaling=yarn(beta_fast=1.0), quantization_config=int4_quantization())


TARGET_FAMILIES: dict[str, Json] = {
    "K2-Instruct": kimi_k2_instruct(),
    "K2-Instruct-0905": kimi_k2_instruct(262144, 64.0),
    "K2-Thinking": kimi_k2_thinking(),
    "K2.5": kimi_k25(),
    "K2.5-MXFP4": kimi_k25_of(quark_quantization()),
    "K2.5-MXFP4-AttnFP8": kimi_k25_of(
        quark_quantization(
            exclude=["lm_head", "re:.*mlp\\.gate$"], layer_quant_config={"*self_attn*": copy.deepcopy(FP8_ROWS)}
        )
    ),
    "K2.5 mxfp4-pack-quantized": kimi_k25_of(mxfp4_quantization()),
    "K2-Thinking-FP8-Block": text_config(quantization_config=fp8_block_quantization()),
}


def mla_draft(aux_layer_ids: list[int] | None = None, **changes: Any) -> Json:
    """lightseekorg/kimi-k2.5-eagle3-mla."""
    json = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "num_hidden_layers": 1,
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": yarn(),
        "max_position_embeddings": 262144,
        "vocab_size": 163840,
        "draft_vocab_size": 163840,
        "torch_dtype": "bfloat16",
        "pad_token_id": 0,
        **changes,
    }
    if aux_layer_ids is not None:
        json["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": aux_layer_ids,
            "use_aux_hidden_state": True,
            **json.get("eagle_config", {}),
        }
    return json


def mha_draft(aux_layer_ids: list[int] | None = None, **changes: Any) -> Json:
    """lightseekorg/kimi-k2.5-eagle3 (full vocabulary)."""
    json = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 7168,
        "num_hidden_layers": 1,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "head_dim": 128,
        "intermediate_size": 12288,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 262144,
        "vocab_size": 163840,
        "draft_vocab_size": 163840,
        "torch_dtype": "float16",
        **changes,
    }
    if aux_layer_ids is not None:
        json["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": aux_layer_ids}
    return json


DRAFT_FAMILIES: dict[str, Json] = {
    "k2.5-eagle3 (MHA)": mha_draft(),
    "k2.5-eagle3-mla": mla_draft([2, 30, 58]),
    "k2.6-eagle3.1-mla": mla_draft([2, 30, 58], fc_norm=True, norm_output=True),
    "k2.7-coder-eagle3.1-mla": mla_draft([1, 29, 57], eagle_config={"fc_norm": True, "norm_output": True}),
    "AQ-MedAI K25 (MHA, 32k)": mha_draft([2, 30, 58], intermediate_size=18432, draft_vocab_size=32000),
    "nvidia (MLA, empty ids)": mla_draft([], rope_scaling=yarn(beta_fast=1.0)),
}
