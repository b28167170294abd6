"""Runners of tiny models on the CPU."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kimi_backend.config.draft_config import Eagle3MhaDraftConfig, Eagle3MlaDraftConfig
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.models.eagle3_draft import Eagle3Draft
from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.runners.target_runner import TargetRunner
from kimi_kernels.kernel_set import KernelSet
from support.draft_steps import build_draft
from support.target_steps import build_target
from support.tiny_checkpoints import Tensors, random_draft, random_target

CPU = torch.device("cpu")
BLOCK_SIZE = 16
NUM_BLOCKS = 40
LIMITS = RunnerLimits(max_num_batched_tokens=256, max_num_seqs=8, max_model_len=128)


@dataclass(frozen=True)
class OwnedRunner:
    """A target runner, with the pool that it writes."""

    runner: TargetRunner
    pool: KvPool


def pool_of(shape: Callable[[int, int], tuple[int, ...]], fill: float) -> KvPool:
    pool = KvPool.allocate(shape, NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU)
    pool.tensor.fill_(fill)
    return pool


def target_runner(
    config: KimiModelConfig,
    tensors: Tensors | None = None,
    *,
    aux_layer_ids: tuple[int, ...] = (2, 3, 4),
    kernels: KernelSet | None = None,
) -> OwnedRunner:
    """A runner whose pool is full of NaN."""
    kernels = kernels or KernelSet.plain()
    model = build_target(config, random_target(config) if tensors is None else tensors, kernels)
    pool = pool_of(model.kv_pool_shape, float("nan"))
    return OwnedRunner(TargetRunner(model, kernels, pool, LIMITS, aux_layer_ids), pool)


@dataclass(frozen=True)
class OwnedDraftRunner:
    """A draft runner, with the model and the pool that it works on."""

    runner: DraftRunner
    model: Eagle3Draft
    pool: KvPool


def draft_runner(
    config: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig,
    tensors: Tensors | None = None,
    *,
    kernels: KernelSet | None = None,
) -> OwnedDraftRunner:
    """A runner whose pool is full of NaN."""
    kernels = kernels or KernelSet.plain()
    model = build_draft(config, random_draft(config) if tensors is None else tensors, kernels)
    pool = pool_of(model.kv_pool_shape, float("nan"))
    return OwnedDraftRunner(DraftRunner(model, kernels, pool, LIMITS, torch.float32), model, pool)
