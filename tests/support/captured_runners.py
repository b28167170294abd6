"""Pairs of runners over the same tiny models: one runs every step eagerly, the other through its static arrays."""

from dataclasses import dataclass
from typing import Any

import torch

from kimi_backend.runners.aux_buffer import AuxBuffer
from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.runners.graphs.recorder import Recorder
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.runners.target_runner import TargetRunner
from kimi_kernels.kernel_set import KernelSet
from support.draft_steps import build_draft
from support.target_steps import build_target
from support.tiny_checkpoints import random_draft, random_target
from support.tiny_configs import draft_config, target_config
from support.tiny_runners import BLOCK_SIZE, CPU, NUM_BLOCKS

LIMITS = RunnerLimits(max_num_batched_tokens=256, max_num_seqs=8, max_model_len=128)
MHA_FIELDS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The device, types and sizes with which a pair of runners computes."""

    kernels: KernelSet
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    """The pools' dtype; None: dtype."""
    kv_scale: float = 1.0
    limits: RunnerLimits = LIMITS
    num_blocks: int = NUM_BLOCKS
    block_size: int = BLOCK_SIZE


def poisoned_pool(shape: object, setting: Setting) -> KvPool:
    """A pool full of NaN."""
    pool = KvPool.allocate(
        shape,  # type: ignore[arg-type]
        setting.num_blocks,
        setting.block_size,
        setting.kv_dtype or setting.dtype,
        setting.device,
        setting.kv_scale,
    )
    pool.tensor.fill_(float("nan"))
    return pool


def runner_pair(
    setting: Setting,
    kind: str,
    recorder: Recorder | None,
    *,
    shares_buffer: bool = True,
    num_regions: int = 1,
    **fields: Any,
) -> tuple[TargetRunner, DraftRunner]:
    """A target and a draft.

    Args:
        recorder: None: plain runners without a buffer.
        shares_buffer: whether the draft knows the target's buffer and its token table, or copies its tensors.
        num_regions: of that buffer.
        fields: of the target's config and an MLA draft's (`num_attention_heads` and such).
    """
    config = target_config(**fields)
    draft_fields = fields if kind != "mha" else {**MHA_FIELDS, "hidden_size": config.hidden_size}
    settings = draft_config(kind, config, **draft_fields)
    model = build_target(config, random_target(config), setting.kernels, setting.device, setting.dtype)
    draft = build_draft(settings, random_draft(settings), setting.kernels, setting.device, setting.dtype)
    buffer = None
    if recorder is not None:
        width = len(settings.aux_layer_ids) * config.hidden_size
        rows = setting.limits.max_num_batched_tokens
        buffer = AuxBuffer.allocate(num_regions, rows, width, setting.dtype, setting.device)
    target = TargetRunner(
        model,
        setting.kernels,
        poisoned_pool(model.kv_pool_shape, setting),
        setting.limits,
        settings.aux_layer_ids,
        aux_buffer=buffer,
        recorder=recorder,
    )
    drafting = DraftRunner(
        draft,
        setting.kernels,
        poisoned_pool(draft.kv_pool_shape, setting),
        setting.limits,
        setting.dtype,
        aux_buffer=buffer if shares_buffer else None,
        recorder=recorder,
        table=target.table if shares_buffer else None,
    )
    for runner in (target, drafting):
        runner.warm_up()
    return target, drafting
