"""`KernelSet`: the ops a model is given, as one frozen value. Which kernels run is an argument, not a switch."""

from dataclasses import dataclass

from kimi_kernels import signatures as op


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSet:
    """Implementations of every op in `signatures`, and the two facts about them that callers plan by."""

    name: str
    row_invariant: bool
    """A row's result has the same bits whatever rows run beside it (docs/architecture.md, "Row invariance")."""
    absorb_prefill: bool
    """All rows go through `mla_decode`, so that a token's bits do not depend on how its prompt was cut."""

    pack_linear: op.PackLinear
    linear: op.Linear
    logits: op.Logits
    per_head_linear: op.PerHeadLinear
    rms_norm: op.RmsNorm
    add_rms_norm: op.AddRmsNorm
    concat_rms_norm: op.ConcatRmsNorm
    chunked_rms_norm: op.ChunkedRmsNorm
    silu_mul: op.SiluMul
    silu_down: op.SiluDown
    rope: op.Rope
    store_latent: op.StoreLatent
    norm_store_latent: op.NormStoreLatent
    plan_mla_decode: op.PlanMlaDecode
    mla_query: op.MlaQuery
    mla_decode: op.MlaDecode
    mla_values: op.MlaValues
    mla_prefill: op.MlaPrefill
    store_kv: op.StoreKv
    mha_attention: op.MhaAttention
    route_experts: op.RouteExperts
    route_silu_down: op.RouteSiluDown
    pack_experts: op.PackExperts
    moe_experts: op.MoeExperts
    sum_terms: op.SumTerms
    mask_logits: op.MaskLogits
    sample_tokens: op.SampleTokens
    verify_draft_tokens: op.VerifyDraftTokens

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
