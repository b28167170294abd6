"""Device code of the Kimi-K2.x server: ops in Triton-language and in torch, of the same signatures."""

from kimi_kernels.attention_batch import AttentionBatch, AttentionMetadata, DecodePlan
from kimi_kernels.kernel_set import KernelSet

__all__ = ["AttentionBatch", "AttentionMetadata", "DecodePlan", "KernelSet"]
