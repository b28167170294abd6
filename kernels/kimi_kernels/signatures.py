"""The contract of every op: one Protocol each, implemented by each kernel set.

Each module says what the letters of its shapes stand for. Ops return new tensors unless they say "in place".
Accumulation is float32 or wider; results have the dtype of the first argument unless stated.
"""

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

__all__ = [
    "AddRmsNorm",
    "ChunkedRmsNorm",
    "ConcatRmsNorm",
    "Linear",
    "Logits",
    "MaskLogits",
    "MhaAttention",
    "MlaDecode",
    "MlaPrefill",
    "MlaQuery",
    "MlaValues",
    "MoeExperts",
    "NormStoreLatent",
    "PackExperts",
    "PackLinear",
    "PerHeadLinear",
    "PlanMlaDecode",
    "RmsNorm",
    "Rope",
    "RouteExperts",
    "RouteSiluDown",
    "SampleTokens",
    "SiluDown",
    "SiluMul",
    "StoreKv",
    "StoreLatent",
    "SumTerms",
    "VerifyDraftTokens",
]
