"""A tiny draft that is stepped by hand."""

import torch

from kimi_backend.checkpoint.canonical_tensors import CanonicalTensors
from kimi_backend.checkpoint.model_specs import draft_tensor_specs
from kimi_backend.checkpoint.tensor_source import InMemoryTensors, TensorSource
from kimi_backend.checkpoint.validation import validate_draft
from kimi_backend.config.draft_config import Eagle3MhaDraftConfig, Eagle3MlaDraftConfig
from kimi_backend.config.linear_format import LinearFormat
from kimi_backend.models.eagle3_draft import Eagle3Draft
from kimi_backend.models.eagle3_mha import Eagle3MhaDraft
from kimi_backend.models.eagle3_mla import Eagle3MlaDraft
from kimi_backend.parallel import SingleRank
from kimi_kernels.kernel_set import KernelSet
from support.paged_sequences import PagedSequences
from support.tiny_checkpoints import Tensors

CPU = torch.device("cpu")


def build_draft(
    config: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig,
    tensors: Tensors,
    kernels: KernelSet | None = None,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    linear_format: LinearFormat = LinearFormat.NONE,
    head_format: LinearFormat | None = None,
) -> Eagle3Draft:
    kernels = kernels or KernelSet.plain()
    return _build(config, InMemoryTensors(tensors), kernels, device, dtype, linear_format, head_format)


def _build(
    config: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig,
    source: TensorSource,
    kernels: KernelSet,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    linear_format: LinearFormat = LinearFormat.NONE,
    head_format: LinearFormat | None = None,
) -> Eagle3Draft:
    if isinstance(config, Eagle3MlaDraftConfig):
        return Eagle3MlaDraft(config, source, kernels, SingleRank(), device, dtype, linear_format, head_format)
    return Eagle3MhaDraft(config, source, kernels, SingleRank(), device, dtype, linear_format, head_format)


def build_stored_draft(
    config: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig, tensors: Tensors, kernels: KernelSet | None = None
) -> Eagle3Draft:
    """A draft from tensors as a file spells and stacks them, checked as a file is."""
    source = InMemoryTensors(tensors)
    canonical = CanonicalTensors.of_draft(source, draft_tensor_specs(config), "draft", ties_head=config.ties_head)
    validate_draft(config, canonical, "draft")
    return _build(config, canonical, kernels or KernelSet.plain())


class DraftSteps:
    """Runs rows of several sequences through a draft and keeps its cache."""

    def __init__(
        self,
        draft: Eagle3Draft,
        capacities: list[int],
        *,
        block_size: int = 16,
        seed: int = 0,
        kernels: KernelSet | None = None,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
        kv_scale: float = 1.0,
    ) -> None:
        """dtype: of the cache."""
        self.draft = draft
        self.kv_scale = kv_scale
        self.kernels = kernels or KernelSet.plain()
        self.sequences = PagedSequences(capacities, block_size=block_size, seed=seed, device=device)
        self.cache = self.sequences.cache(draft.kv_pool_shape(self.sequences.num_blocks, block_size), dtype)

    def step(
        self, chunks: list[tuple[int, list[int]]], hidden: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Logits and feedback hidden states of each chunk's rows; hidden: [rows, H] of each chunk."""
        rows = self.sequences.rows(chunks)
        metadata = self.sequences.metadata(rows, self.kernels, self.draft.num_mla_heads)
        token_ids = torch.from_numpy(rows.token_ids).to(self.sequences.device)
        normed, feedback = self.draft.forward(token_ids, torch.cat(hidden), metadata, self.cache, self.kv_scale)
        sizes = rows.query_lens.tolist()
        return list(self.draft.compute_logits(normed).split(sizes)), list(feedback.split(sizes))
