"""The fate of every field of a config.json: nothing that changes the model is dropped in silence.

A field is implemented (some parser reads it), harmless (here, with the reason), supported with one value (here, with
what another would take; any other is refused by name), or unknown: then the user is warned of it by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kimi_backend.config.json_fields import JsonFields, shown

_ANY_MODEL = {
    "training only": """attention_dropout hidden_dropout initializer_range aux_loss_alpha seq_aux router_aux_loss_coef
        output_router_logits ep_size pretraining_tp train_router embed_requires_grad enable_sp_ulysses loss_type
        moe_router_bias_update_speed ttt_steps length""",
    "bookkeeping of transformers": """transformers_version auto_map _name_or_path _attn_implementation
        attn_implementation _attn_implementation_internal use_cache return_dict return_dict_in_generate
        output_attentions output_hidden_states output_scores chunk_size_feed_forward torchscript use_bfloat16
        tf_legacy_loss pruned_heads remove_invalid_values is_decoder is_encoder_decoder add_cross_attention
        cross_attention_hidden_size tie_encoder_decoder id2label label2id problem_type finetuning_task
        task_specific_params decoder_start_token_id tokenizer_class prefix _commit_hash model_type architectures""",
    "defaults of generation, which every request states": """do_sample early_stopping temperature top_k top_p typical_p
        min_length max_length num_beams num_beam_groups num_return_sequences length_penalty repetition_penalty
        diversity_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids begin_suppress_tokens
        suppress_tokens forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty sep_token_id""",
    "images and video, which a text server does not take": """vision_config audio_config media_placeholder_token_id
        ignore_index use_unified_vision_chunk video_placeholder image_token_id video_token_id vision_start_token_id
        vision_end_token_id image_token_index modal_type mrope_section mrope_interleaved use_mrope""",
    "derived from fields that are read": "head_dim qk_head_dim num_key_value_heads torch_dtype dtype",
    "how the quantised file was made": """observer observer_kwargs version global_compression_ratio block_structure
        quantization_status activation_scheme zp_dtype scale_dtype transform_config algo_config quant_mode
        kv_cache_post_rope min_kv_scale min_kv_cache pack_method target_device observer_cls round_method scale_type
        scale_calculation_mode mx_element_dtype is_scale_quant symmetric enable_buffer_reuse max_input_numel
        producer""",
}
_DRAFTS_ONLY = {
    "the target's and its tokenizer's files decide": """bos_token_id eos_token_id pad_token_id unk_token_id
        mask_token_id""",
    "experts in the template of a draft whose layer is dense (`use_moe` would say otherwise)": """n_routed_experts
        n_shared_experts num_experts_per_tok moe_intermediate_size moe_layer_freq n_group topk_group norm_topk_prob
        routed_scaling_factor scoring_func topk_method first_k_dense_replace num_nextn_predict_layers
        decoder_sparse_step mlp_only_layers""",
    "where the draft comes from": """speculators_config speculators_version speculators_model_type target_model_type
        target_layer_count has_no_defaults_at_init has_lm_head eagle_decoder_type""",
    "of heads that `parallel_draft_step` would switch on": "parallel_draft_heads_num_layers",
    "the file's tensors say it": "mlp_bias reuse_target_lm_head",
}


@dataclass(frozen=True, slots=True)
class _Only:
    """The values that say nothing, and what serving another would take."""

    values: tuple[Any, ...]
    takes: str


_ONLY_IN_ANY_MODEL = {
    "hidden_act": _Only(("silu",), "another activation in the MLP kernels"),
    "partial_rotary_factor": _Only((1, 1.0), "a rotation of a part of each head"),
    "qk_layernorm": _Only((False,), "a norm of queries and keys"),
    "use_qk_norm": _Only((False,), "a norm of queries and keys"),
    "attention_chunk_size": _Only((), "attention in chunks"),
    "attn_logit_softcapping": _Only((), "a bound of attention scores"),
    "final_logit_softcapping": _Only((), "a bound of logits"),
    "logit_scale": _Only((1, 1.0), "a factor of the logits"),
    "logits_scaling": _Only((1, 1.0), "a factor of the logits"),
    "attention_multiplier": _Only((), "another softmax scale"),
    "residual_multiplier": _Only((1, 1.0), "a factor of the residual stream"),
    "embedding_multiplier": _Only((1, 1.0), "a factor of the embedding"),
    "position_embedding_type": _Only(("rope",), "other position embeddings"),
    "is_causal": _Only((True,), "attention that looks ahead"),
    "sparsity_config": _Only(({},), "sparse weights"),
    "mla_use_nope": _Only((False,), "attention without rotation, and its softmax scale"),
    "index_topk": _Only((), "DeepSeek-V3.2's sparse attention"),
    "index_n_heads": _Only((), "DeepSeek-V3.2's sparse attention"),
    "index_head_dim": _Only((), "DeepSeek-V3.2's sparse attention"),
}
_ONLY_IN_TARGETS = {
    "scoring_func": _Only(("sigmoid",), "another scoring function in the router"),
    "topk_method": _Only(("noaux_tc",), "another choice of experts"),
    "attention_bias": _Only((False,), "biases in the target's attention"),
    "mlp_bias": _Only((False,), "biases in the target's MLP"),
    "sliding_window": _Only((), "a window in the target's attention"),
    "tie_word_embeddings": _Only((False,), "a head that is the target's embedding"),
}
_ONLY_IN_DRAFTS = {
    "use_aux_hidden_state": _Only((True,), "EAGLE-1's single hidden state"),
    "use_last_layernorm": _Only((True,), "a draft without its final norm"),
    "use_mtp_layernorm": _Only((False,), "the norms of a multi-token-prediction layer"),
    "use_input_layernorm_in_first_layer": _Only((True,), "an embedding that is not normed"),
    "next_layer_regular": _Only((True,), "later layers that read the embedding again"),
    "parallel_draft_step": _Only((1,), "heads that draft several tokens in one step"),
    "additional_fc": _Only((False,), "a second fc"),
    "use_moe": _Only((False,), "routed experts in the draft"),
    "num_experts": _Only((), "routed experts in the draft"),
    "num_local_experts": _Only((), "routed experts in the draft"),
    "experts_per_token": _Only((), "routed experts in the draft"),
}


def account_for_target(fields: JsonFields) -> None:
    """Refuse or warn of what a target's parsed config holds beside the fields that were read.

    Raises:
        ConfigError: a field has a value that this server does not implement.
    """
    _account(fields, _reasons(_ANY_MODEL), {**_ONLY_IN_ANY_MODEL, **_ONLY_IN_TARGETS})


def account_for_draft(fields: JsonFields) -> None:
    """Do what `account_for_target` does, for a draft."""
    supported = {**_ONLY_IN_ANY_MODEL, **_ONLY_IN_DRAFTS}
    _account(fields, _reasons(_ANY_MODEL, _DRAFTS_ONLY), supported)


def _reasons(*tables: Mapping[str, str]) -> dict[str, str]:
    return {name: reason for table in tables for reason, names in table.items() for name in names.split()}


def _account(fields: JsonFields, harmless: Mapping[str, str], supported: Mapping[str, _Only]) -> None:
    unknown: dict[str, list[str]] = {}
    for holder, name in fields.unread():
        if name in supported:
            holder.require(name, *supported[name].values, takes=supported[name].takes)
        elif name not in harmless:
            unknown.setdefault(holder.path, []).append(f"{name} {shown(holder.data[name])}")
    for path, found in unknown.items():
        fields.warnings.append(f"{path}: this server does not know and ignores {', '.join(found)}")
