"""`KernelSet`: the ops a model is given, as one frozen value. Which kernels run is an argument, not a switch."""

from dataclasses import dataclass

from kimi_kernels.linear.op import Linear, Logits, PackLinear, PerHeadLinear
from kimi_kernels.mha_attention.op import MhaAttention, StoreKv
from kimi_kernels.mla_decode.op import MlaDecode, MlaValues, PlanMlaDecode
from kimi_kernels.mla_prefill.op import MlaPrefill
from kimi_kernels.mla_query.op import MlaQuery
from kimi_kernels.moe_experts.op import MoeExperts, PackExperts, SumTerms
from kimi_kernels.moe_route.op import RouteExperts, RouteSiluDown
from kimi_kernels.rms_norm.op import AddRmsNorm, ChunkedRmsNorm, ConcatRmsNorm, RmsNorm
from kimi_kernels.rope.op import Rope
from kimi_kernels.sampling.op import MaskLogits, SampleTokens, VerifyDraftTokens
from kimi_kernels.silu_mul.op import SiluDown, SiluMul
from kimi_kernels.store_latent.op import NormStoreLatent, StoreLatent


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSet:
    """Implementations of every op, and the two facts about them that callers plan by.

    Each op's module says what the letters of its shapes stand for. Ops return new tensors unless they say "in place".
    Accumulation is float32 or wider; results have the dtype of the first argument unless stated.
    """

    name: str
    row_invariant: bool
    """A row's result has the same bits whatever rows run beside it (docs/architecture.md, "Row invariance")."""
    absorb_prefill: bool
    """All rows go through `mla_decode`, so that a token's bits do not depend on how its prompt was cut."""

    pack_linear: PackLinear
    linear: Linear
    logits: Logits
    per_head_linear: PerHeadLinear
    rms_norm: RmsNorm
    add_rms_norm: AddRmsNorm
    concat_rms_norm: ConcatRmsNorm
    chunked_rms_norm: ChunkedRmsNorm
    silu_mul: SiluMul
    silu_down: SiluDown
    rope: Rope
    store_latent: StoreLatent
    norm_store_latent: NormStoreLatent
    plan_mla_decode: PlanMlaDecode
    mla_query: MlaQuery
    mla_decode: MlaDecode
    mla_values: MlaValues
    mla_prefill: MlaPrefill
    store_kv: StoreKv
    mha_attention: MhaAttention
    route_experts: RouteExperts
    route_silu_down: RouteSiluDown
    pack_experts: PackExperts
    moe_experts: MoeExperts
    sum_terms: SumTerms
    mask_logits: MaskLogits
    sample_tokens: SampleTokens
    verify_draft_tokens: VerifyDraftTokens

    @staticmethod
    def plain() -> "KernelSet":
        """Plain torch, float32, row-invariant, on a CPU and on a GPU. Needs no Triton-language."""
        from kimi_kernels.plain_kernels import plain_kernel_set

        return plain_kernel_set()

    @staticmethod
    def triton() -> "KernelSet":
        """Triton-language kernels for a CUDA device.

        Raises:
            ImportError: Triton-language is not installed.
        """
        from kimi_kernels.triton_kernels import triton_kernel_set

        return triton_kernel_set()
