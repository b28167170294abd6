"""Ops that a kernel set may fuse, composed of its other ops: what a set does that has nothing better, bit for bit."""

from typing import Any

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require_shape
from kimi_kernels.attention_batch import AttentionBatch
from kimi_kernels.linear.op import Linear, PerHeadLinear
from kimi_kernels.mla_decode.op import MlaDecode, MlaValues
from kimi_kernels.mla_prefill.op import MlaPrefill, check_prefill
from kimi_kernels.mla_query.op import MlaQuery
from kimi_kernels.moe_route.op import RouteExperts, RouteSiluDown
from kimi_kernels.rms_norm.op import RmsNorm
from kimi_kernels.rope.op import Rope
from kimi_kernels.silu_mul.op import SiluDown, SiluMul
from kimi_kernels.store_latent.op import NormStoreLatent, StoreLatent
from kimi_kernels.weights import PackedWeight


def composed_mla_query(per_head_linear: PerHeadLinear, rope: Rope) -> MlaQuery:
    """`MlaQuery`."""

    def mla_query(q: Tensor, w_uk: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
        q_nope, q_pe = torch.split(q, [w_uk.shape[1], q.shape[2] - w_uk.shape[1]], dim=2)
        return torch.cat([per_head_linear(q_nope, w_uk), rope(q_pe, cos_sin, positions, interleaved)], dim=2)

    return mla_query


def composed_silu_down(silu_mul: SiluMul, linear: Linear) -> SiluDown:
    """`SiluDown`."""

    def silu_down(gate_up: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
        return linear(silu_mul(gate_up.to(dtype)), weight)

    return silu_down


def composed_norm_store_latent(rms_norm: RmsNorm, store_latent: StoreLatent) -> NormStoreLatent:
    """`NormStoreLatent`."""

    def norm_store_latent(
        query: Tensor,
        query_weight: Tensor,
        kv_a: Tensor,
        norm_weight: Tensor,
        eps: float,
        cos_sin: Tensor,
        positions: Tensor,
        interleaved: bool,
        latent_cache: Tensor,
        slot_mapping: Tensor,
        kv_scale: float = 1.0,
    ) -> Tensor:
        if query.shape != (kv_a.shape[0], query_weight.numel()):
            require_shape("query", query, kv_a.shape[0], query_weight.numel())
        store_latent(kv_a, norm_weight, eps, cos_sin, positions, interleaved, latent_cache, slot_mapping, kv_scale)
        return rms_norm(query, query_weight, eps)

    return norm_store_latent


def composed_route_silu_down(route_experts: RouteExperts, silu_down: SiluDown) -> RouteSiluDown:
    """`RouteSiluDown`."""

    def route_silu_down(
        router_logits: Tensor,
        correction_bias: Tensor,
        gate_up: Tensor,
        weight: PackedWeight,
        dtype: torch.dtype,
        **settings: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        topk_ids, topk_weights = route_experts(router_logits, correction_bias, **settings)
        return topk_ids, topk_weights, silu_down(gate_up, weight, dtype)

    return route_silu_down


def composed_mla_values(mla_decode: MlaDecode, per_head_linear: PerHeadLinear) -> MlaValues:
    """`MlaValues`."""

    def mla_values(
        q: Tensor,
        latent_cache: Tensor,
        batch: AttentionBatch,
        w_uv: Tensor,
        softmax_scale: float,
        kv_scale: float = 1.0,
    ) -> Tensor:
        latents, _ = mla_decode(q, latent_cache, batch, w_uv.shape[1], softmax_scale, kv_scale)
        return per_head_linear(latents, w_uv)

    return mla_values


def composed_mla_prefill(per_head_linear: PerHeadLinear, mla_values: MlaValues) -> MlaPrefill:
    """`MlaPrefill` in the absorbed form, of a set that absorbs every row."""

    def mla_prefill(
        q: Tensor,
        latent_cache: Tensor,
        w_uk: Tensor,
        w_uv: Tensor,
        batch: AttentionBatch,
        softmax_scale: float,
        kv_scale: float = 1.0,
    ) -> Tensor:
        check_prefill(q, latent_cache, w_uk, w_uv, batch, softmax_scale, kv_scale)
        q_nope, q_pe = torch.split(q, [w_uk.shape[1], q.shape[2] - w_uk.shape[1]], dim=2)
        q_latent = torch.cat([per_head_linear(q_nope, w_uk), q_pe], dim=2)
        return mla_values(q_latent, latent_cache, batch, w_uv, softmax_scale, kv_scale)

    return mla_prefill
