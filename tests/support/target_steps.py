"""A tiny target that is stepped by hand."""

import torch

from kimi_backend.checkpoint.tensor_source import InMemoryTensors
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.models.kimi_k25 import KimiTarget
from kimi_backend.parallel import SingleRank
from kimi_kernels.kernel_set import KernelSet
from support.paged_sequences import PagedSequences
from support.tiny_checkpoints import Tensors

CPU = torch.device("cpu")


def build_target(
    config: KimiModelConfig,
    tensors: Tensors,
    kernels: KernelSet | None = None,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> KimiTarget:
    kernels = kernels or KernelSet.plain()
    return KimiTarget(config, InMemoryTensors(tensors), kernels, SingleRank(), device, dtype)


class TargetSteps:
    """Runs chunks of several sequences through a target and keeps its cache."""

    def __init__(
        self,
        target: KimiTarget,
        kernels: KernelSet,
        capacities: list[int],
        *,
        aux_layer_ids: tuple[int, ...] = (),
        block_size: int = 16,
        seed: int = 0,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.target = target
        self.kernels = kernels
        self.aux_layer_ids = aux_layer_ids
        self.sequences = PagedSequences(capacities, block_size=block_size, seed=seed, device=device)
        self.cache = self.sequences.cache(target.kv_pool_shape(self.sequences.num_blocks, block_size), dtype)

    def step(self, chunks: list[tuple[int, list[int]]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Logits and aux hidden states of each chunk's rows."""
        rows = self.sequences.rows(chunks)
        metadata = self.sequences.metadata(rows, self.kernels, self.target.num_heads)
        token_ids = torch.from_numpy(rows.token_ids).to(self.sequences.device)
        hidden, aux = self.target.forward(token_ids, metadata, self.cache, aux_layer_ids=self.aux_layer_ids)
        logits = self.target.compute_logits(hidden)
        sizes = rows.query_lens.tolist()
        return list(logits.split(sizes)), [] if aux is None else list(aux.split(sizes))

    def run(self, tokens: list[int], splits: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """One sequence in chunks of the given sizes: logits and aux of all rows."""
        all_logits, all_aux, start = [], [], 0
        for size in splits:
            logits, aux = self.step([(0, tokens[start : start + size])])
            all_logits.append(logits[0])
            all_aux += aux
            start += size
        return torch.cat(all_logits), torch.cat(all_aux) if all_aux else torch.empty(0)
