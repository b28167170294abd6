"""Device code of the Kimi-K2.x server, each op with a plain-torch reference of the same signature."""

from kimi_kernels.attention_batch import AttentionBatch, AttentionMetadata, DecodePlan
from kimi_kernels.kernel_set import KernelSet

__all__ = ["AttentionBatch", "AttentionMetadata", "DecodePlan", "KernelSet"]
