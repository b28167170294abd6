"""A kernel set of a few torch operations each, none of which waits for the device: right shapes, no attention.

For tests of what stands around the kernels.
"""

import torch

from kimi_kernels.attention_batch import AttentionBatch, DecodePlan
from kimi_kernels.compositions import (
    composed_mla_query,
    composed_mla_values,
    composed_norm_store_latent,
    composed_route_silu_down,
    composed_silu_down,
)
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.moe_experts.op import Terms
from kimi_kernels.moe_experts.plain import sum_terms
from kimi_kernels.quantization.plain import dequantize
from kimi_kernels.sampling.plain import mask_logits
from kimi_kernels.sampling_inputs import (
    PLACEHOLDER_TOKEN_ID,
    STATUS_OK,
    SampleOutput,
    SamplingInputs,
    SamplingRows,
    VerifyOutput,
    VocabularyMap,
)
from kimi_kernels.weights import ExpertWeights, LinearWeight, PackedExperts, PackedWeight

Tensor = torch.Tensor


def _pack_linear(weight: LinearWeight) -> PackedWeight:
    out_features, in_features = weight.shape
    return PackedWeight(kind="dense", tensors=(dequantize(weight),), out_features=out_features, in_features=in_features)


def _linear(x: Tensor, weight: PackedWeight) -> Tensor:
    return x @ weight.tensors[0].T


def _logits(x: Tensor, weight: PackedWeight) -> Tensor:
    return x.float() @ weight.tensors[0].float().T


def _per_head_linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("tni,nio->tno", x, weight)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def _add_rms_norm(
    x: Terms, residual: Tensor, weight: Tensor, eps: float, second: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    total = sum_terms(x, second) + residual
    return _rms_norm(total, weight, eps), total


def _concat_rms_norm(a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor, eps: float) -> Tensor:
    return torch.cat([_rms_norm(a, a_weight, eps), _rms_norm(b, b_weight, eps)], dim=1)


def _chunked_rms_norm(x: Tensor, weights: Tensor, eps: float) -> Tensor:
    chunks = x.view(x.shape[0], *weights.shape)
    return (torch.nn.functional.rms_norm(chunks, (chunks.shape[-1],), None, eps) * weights).flatten(1)


def _silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _rope(x: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    return x * cos_sin[positions][:, None].to(x.dtype)


def _store_latent(
    kv_a: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    interleaved: bool,
    latent_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: float = 1.0,
) -> None:
    latent_cache.flatten(0, 1).index_copy_(0, slot_mapping.clamp(min=0), kv_a.to(latent_cache.dtype))


def _plan_mla_decode(
    batch: AttentionBatch, num_heads: int, block_size: int, split_tokens: int = 0
) -> DecodePlan | None:
    return DecodePlan(tensors=(batch.seq_lens + 1,))


def _mla_decode(
    q: Tensor,
    latent_cache: Tensor,
    batch: AttentionBatch,
    kv_lora_rank: int,
    softmax_scale: float,
    kv_scale: float = 1.0,
    return_lse: bool = False,
    row_keys: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    return q[..., :kv_lora_rank], None


def _mla_prefill(
    q: Tensor,
    latent_cache: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    batch: AttentionBatch,
    softmax_scale: float,
    kv_scale: float = 1.0,
) -> Tensor:
    return q[..., : w_uv.shape[2]]


def _store_kv(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: float = 1.0) -> None:
    for cache, rows in zip(kv_cache, (k, v), strict=True):
        cache.flatten(0, 1).index_copy_(0, slot_mapping.clamp(min=0), rows)


def _mha_attention(
    q: Tensor,
    kv_cache: Tensor,
    batch: AttentionBatch,
    softmax_scale: float,
    sliding_window: int | None,
    kv_scale: float = 1.0,
) -> Tensor:
    return q


def _route_experts(
    router_logits: Tensor,
    correction_bias: Tensor,
    *,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    renormalize: bool,
    scaling_factor: float,
    slot_mapping: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    weights, ids = (router_logits.sigmoid() + correction_bias).topk(top_k, dim=1)
    return ids.int(), weights * scaling_factor


def _pack_experts(weights: ExpertWeights) -> PackedExperts:
    num_experts, hidden_size, intermediate_size = weights.down.shape
    return PackedExperts(
        kind="dense",
        tensors=(dequantize(weights.gate_up), dequantize(weights.down)),
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
    )


def _moe_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: PackedExperts, first_expert: int = 0
) -> Tensor:
    return x * topk_weights.sum(dim=1, keepdim=True).to(x.dtype)


def _sample_tokens(
    logits: Tensor,
    inputs: SamplingInputs,
    rows: SamplingRows,
    vocabulary_map: VocabularyMap | None = None,
    num_logprobs: int | None = None,
) -> SampleOutput:
    columns = logits.argmax(dim=1)
    token_ids = columns if vocabulary_map is None else vocabulary_map.token_id_of_column[columns]
    return SampleOutput(token_ids=token_ids, status=torch.zeros_like(token_ids, dtype=torch.int32))


def _verify_draft_tokens(
    token_ids: Tensor, status: Tensor, first_row: Tensor, draft_token_ids: Tensor, num_draft_tokens: Tensor
) -> VerifyOutput:
    width = draft_token_ids.shape[1]
    place = torch.arange(width + 1, device=token_ids.device)
    row = (first_row[:, None] + place).clamp(max=len(token_ids) - 1)
    drawn = token_ids[row]
    is_right = (drawn[:, :width] == draft_token_ids) & (status[row[:, :width]] == STATUS_OK)
    num_accepted = (is_right & (place[:width] < num_draft_tokens[:, None])).int().cumprod(dim=1).sum(dim=1)
    last_row = first_row + num_accepted
    return VerifyOutput(
        output_token_ids=drawn.masked_fill(place > num_accepted[:, None], PLACEHOLDER_TOKEN_ID),
        num_accepted_tokens=num_accepted.int(),
        last_row=last_row,
        status=status[last_row],
    )


def device_kernel_set() -> KernelSet:
    return KernelSet(
        name="device",
        row_invariant=False,
        absorb_prefill=False,
        pack_linear=_pack_linear,
        linear=_linear,
        per_head_linear=_per_head_linear,
        logits=_logits,
        mla_query=composed_mla_query(_per_head_linear, _rope),
        rms_norm=_rms_norm,
        add_rms_norm=_add_rms_norm,
        concat_rms_norm=_concat_rms_norm,
        chunked_rms_norm=_chunked_rms_norm,
        silu_mul=_silu_mul,
        silu_down=composed_silu_down(_silu_mul, _linear),
        rope=_rope,
        store_latent=_store_latent,
        norm_store_latent=composed_norm_store_latent(_rms_norm, _store_latent),
        plan_mla_decode=_plan_mla_decode,
        mla_decode=_mla_decode,
        mla_values=composed_mla_values(_mla_decode, _per_head_linear),
        mla_prefill=_mla_prefill,
        store_kv=_store_kv,
        mha_attention=_mha_attention,
        route_experts=_route_experts,
        route_silu_down=composed_route_silu_down(_route_experts, composed_silu_down(_silu_mul, _linear)),
        pack_experts=_pack_experts,
        moe_experts=_moe_experts,
        sum_terms=sum_terms,
        mask_logits=mask_logits,
        sample_tokens=_sample_tokens,
        verify_draft_tokens=_verify_draft_tokens,
    )
