"""`plain_kernel_set`: the ops in torch."""

from kimi_kernels.compositions import (
    composed_mla_prefill,
    composed_mla_query,
    composed_mla_values,
    composed_norm_store_latent,
    composed_route_silu_down,
    composed_silu_down,
)
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.linear.plain import linear, logits, pack_linear, per_head_linear
from kimi_kernels.mha_attention.plain import mha_attention, store_kv
from kimi_kernels.mla_decode.plain import mla_decode, plan_mla_decode
from kimi_kernels.moe_experts.plain import moe_experts, pack_experts, sum_terms
from kimi_kernels.moe_route.plain import route_experts
from kimi_kernels.rms_norm.plain import add_rms_norm, chunked_rms_norm, concat_rms_norm, rms_norm
from kimi_kernels.rope.plain import rope
from kimi_kernels.sampling.plain import mask_logits, sample_tokens, verify_draft_tokens
from kimi_kernels.silu_mul.plain import silu_mul
from kimi_kernels.store_latent.plain import store_latent


def plain_kernel_set() -> KernelSet:
    """Kernels for any device."""
    silu_down = composed_silu_down(silu_mul, linear)
    mla_values = composed_mla_values(mla_decode, per_head_linear)
    return KernelSet(
        name="plain",
        row_invariant=True,
        absorb_prefill=True,
        pack_linear=pack_linear,
        linear=linear,
        per_head_linear=per_head_linear,
        logits=logits,
        mla_query=composed_mla_query(per_head_linear, rope),
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        concat_rms_norm=concat_rms_norm,
        chunked_rms_norm=chunked_rms_norm,
        silu_mul=silu_mul,
        silu_down=silu_down,
        rope=rope,
        store_latent=store_latent,
        norm_store_latent=composed_norm_store_latent(rms_norm, store_latent),
        plan_mla_decode=plan_mla_decode,
        mla_decode=mla_decode,
        mla_values=mla_values,
        mla_prefill=composed_mla_prefill(per_head_linear, mla_values),
        store_kv=store_kv,
        mha_attention=mha_attention,
        route_experts=route_experts,
        route_silu_down=composed_route_silu_down(route_experts, silu_down),
        pack_experts=pack_experts,
        moe_experts=moe_experts,
        sum_terms=sum_terms,
        mask_logits=mask_logits,
        sample_tokens=sample_tokens,
        verify_draft_tokens=verify_draft_tokens,
    )
