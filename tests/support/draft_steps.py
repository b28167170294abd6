"""A tiny draft that is stepped by hand."""

import torch

from kimi_backend.checkpoint.tensor_source import InMemoryTensors
from kimi_backend.config.draft_config import Eagle3MhaDraftConfig, Eagle3MlaDraftConfig
from kimi_backend.models.eagle3_draft import Eagle3Draft
from kimi_backend.models.eagle3_mha import Eagle3MhaDraft
from kimi_backend.models.eagle3_mla import Eagle3MlaDraft
from kimi_backend.parallel import SingleRank
from kimi_kernels.kernel_set import KernelSet
from support.paged_sequences import PagedSequences
from support.tiny_checkpoints import Tensors

CPU = torch.device("cpu")


def build_draft(config: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig, tensors: Tensors) -> Eagle3Draft:
    source, kernels = InMemoryTensors(tensors), KernelSet.reference()
    if isinstance(config, Eagle3MlaDraftConfig):
        return Eagle3MlaDraft(config, source, kernels, SingleRank(), CPU, torch.float32)
    return Eagle3MhaDraft(config, source, kernels, SingleRank(), CPU, torch.float32)


class DraftSteps:
    """Runs rows of several sequences through a draft and keeps its cache."""

    def __init__(self, draft: Eagle3Draft, capacities: list[int], *, block_size: int = 16, seed: int = 0) -> None:
        self.draft = draft
        self.kernels = KernelSet.reference()
        self.sequences = PagedSequences(capacities, block_size=block_size, seed=seed)
        self.cache = self.sequences.cache(draft.kv_pool_shape(self.sequences.num_blocks, block_size))

    def step(
        self, chunks: list[tuple[int, list[int]]], hidden: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Logits and feedback hidden states of each chunk's rows; hidden: [rows, H] of each chunk."""
        rows = self.sequences.rows(chunks)
        metadata = self.sequences.metadata(rows, self.kernels, self.draft.num_mla_heads)
        normed, feedback = self.draft.forward(torch.from_numpy(rows.token_ids), torch.cat(hidden), metadata, self.cache)
        sizes = rows.query_lens.tolist()
        return list(self.draft.compute_logits(normed).split(sizes)), list(feedback.split(sizes))
