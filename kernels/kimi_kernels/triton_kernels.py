"""`triton_kernel_set`: the ops in Triton-language."""

from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.linear.kernel import linear, logits, pack_linear, per_head_linear
from kimi_kernels.mha_attention.kernel import mha_attention, store_kv
from kimi_kernels.mla_decode.kernel import mla_decode, plan_mla_decode
from kimi_kernels.mla_decode.kernel_values import mla_values
from kimi_kernels.mla_prefill.kernel import mla_prefill
from kimi_kernels.mla_query.kernel import mla_query
from kimi_kernels.moe_experts.kernel import moe_experts, pack_experts
from kimi_kernels.moe_experts.kernel_sum import sum_terms
from kimi_kernels.moe_route.kernel import route_experts
from kimi_kernels.moe_route.kernel_shared import route_silu_down
from kimi_kernels.rms_norm.kernel import add_rms_norm, chunked_rms_norm, concat_rms_norm, rms_norm
from kimi_kernels.rope.kernel import rope
from kimi_kernels.sampling.kernel import mask_logits, sample_tokens, verify_draft_tokens
from kimi_kernels.silu_mul.kernel import silu_mul
from kimi_kernels.silu_mul.kernel_down import silu_down
from kimi_kernels.store_latent.kernel import store_latent
from kimi_kernels.store_latent.kernel_query import norm_store_latent


def triton_kernel_set() -> KernelSet:
    """Kernels for a CUDA device."""
    return KernelSet(
        name="triton",
        row_invariant=False,
        absorb_prefill=False,
        plan_mla_decode=plan_mla_decode,
        mla_decode=mla_decode,
        mla_values=mla_values,
        mla_prefill=mla_prefill,
        mha_attention=mha_attention,
        store_kv=store_kv,
        store_latent=store_latent,
        norm_store_latent=norm_store_latent,
        rope=rope,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        concat_rms_norm=concat_rms_norm,
        chunked_rms_norm=chunked_rms_norm,
        silu_mul=silu_mul,
        silu_down=silu_down,
        pack_linear=pack_linear,
        linear=linear,
        per_head_linear=per_head_linear,
        logits=logits,
        mla_query=mla_query,
        route_experts=route_experts,
        route_silu_down=route_silu_down,
        pack_experts=pack_experts,
        moe_experts=moe_experts,
        sum_terms=sum_terms,
        mask_logits=mask_logits,
        sample_tokens=sample_tokens,
        verify_draft_tokens=verify_draft_tokens,
    )
