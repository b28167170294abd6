"""The checkpoints that the settings name, opened but not read, and how they divide the memory."""

import logging
import os
from dataclasses import dataclass

import torch

from kimi_backend.checkpoint.loading import DraftCheckpoint, TargetCheckpoint
from kimi_backend.config.chosen_configs import draft_overrides
from kimi_backend.config.memory_plan import GIB, RANKS_BYTES, MemoryPlan, MemorySettings, plan_memory
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ConfigError
from kimi_backend.runners.load.draft_choice import chosen_draft, head_format, linear_format
from kimi_backend.runners.load.placement import Placement, captures_steps, place
from kimi_backend.runners.ranks.divisible import check_divides

logger = logging.getLogger("kimi_backend.runners")

_GPU_SHARE = 0.92
_CPU_KV_BYTES = GIB // 4
"""The bytes that both pools may take of a machine's own memory where `kv_tokens` does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """The target, and its draft if there is one."""

    target: TargetCheckpoint
    draft: DraftCheckpoint | None

    @classmethod
    def open(cls, settings: ServingSettings, placement: Placement) -> "Checkpoints":
        """Check every tensor's name, shape and dtype; or make them up, where the settings say so.

        Raises:
            ConfigError, CheckpointError: the settings or files cannot be served.
        """
        if not settings.checkpoint:
            raise ConfigError("setting checkpoint: empty, the folder of a checkpoint is needed")
        for part in settings.synthetic_parts:
            logger.warning("synthetic=%r, for timing only", part)
        is_dummy = settings.load_format == "dummy"
        checkpoints = cls._dummy(settings, placement.device) if is_dummy else cls._from_files(settings)
        checkpoints._log_configs()
        return checkpoints

    def _log_configs(self) -> None:
        draft = self.draft.config if self.draft else None
        for warning in (*self.target.config.warnings, *(draft.warnings if draft else ())):
            logger.warning("%s", warning)
        if draft is not None:
            layers = ", ".join(f"R({j})" for j in draft.aux_layer_ids)
            logger.info("the draft reads %s of the target: %s", layers, draft.aux_layer_rule)

    @classmethod
    def _from_files(cls, settings: ServingSettings) -> "Checkpoints":
        if not settings.draft:
            return cls(target=TargetCheckpoint.open(settings.checkpoint), draft=None)
        # The draft first: the target has thousands of times its tensors, and one that is wrong is told the sooner.
        config = KimiModelConfig.from_hf_json(settings.checkpoint)
        draft = DraftCheckpoint.open(settings.draft, config, draft_overrides(settings))
        target = TargetCheckpoint.open(settings.checkpoint)
        return cls(target=target, draft=chosen_draft(settings, draft, target))

    def check_ranks(self, size: int) -> None:
        """Raises ConfigError unless `size` ranks can divide them."""
        check_divides(size, self.target.config, self.draft.config if self.draft else None)

    @classmethod
    def _dummy(cls, settings: ServingSettings, device: torch.device) -> "Checkpoints":
        target = TargetCheckpoint.dummy(settings.checkpoint, device)
        if not settings.draft:
            return cls(target=target, draft=None)
        draft = DraftCheckpoint.dummy(settings.draft, target.config, device, draft_overrides(settings))
        return cls(target=target, draft=chosen_draft(settings, draft, target))


def memory_plan(settings: ServingSettings, checkpoints: Checkpoints, placement: Placement) -> MemoryPlan:
    """The division both runners come to alike, from the configs and the settings only.

    Raises:
        ConfigError: it does not fit.
    """
    on_gpu = placement.device.type == "cuda"
    num_blocks = -(-settings.kv_tokens // settings.block_size) or None
    target, draft = checkpoints.target.config, checkpoints.draft.config if checkpoints.draft else None
    if not on_gpu and num_blocks is None:
        per_token = target.kv_bytes_per_token(_name(placement.kv_dtype))
        if draft is not None:
            per_token += draft.kv_bytes_per_token(_name(placement.kv_dtype), settings.tensor_parallel_size)
        longest = settings.max_model_len or target.max_position_embeddings
        fitting = _CPU_KV_BYTES // (per_token * settings.block_size)
        num_blocks = max(-(-longest // settings.block_size), min(fitting, settings.max_num_seqs * longest))
    return plan_memory(
        target,
        draft,
        MemorySettings(
            gpu_bytes=_memory_bytes(settings, placement),
            tp_size=settings.tensor_parallel_size,
            block_size=settings.block_size,
            kv_cache_dtype=_name(placement.kv_dtype),
            weight_dtype=_name(placement.dtype),
            draft_format=linear_format(settings),
            draft_head_format=head_format(settings),
            widens_matrices=placement.kernels.name == "plain",
            max_model_len=settings.max_model_len,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_sampled_rows=settings.max_num_seqs * (settings.most_draft_tokens + 1),
            max_num_seqs=settings.max_num_seqs,
            captures_steps=captures_steps(settings, placement),
            overhead_bytes=3 * GIB if on_gpu else settings.lookup_bytes + settings.lookup_pool_bytes,  # the host's
            ranks_bytes=RANKS_BYTES if on_gpu else 0,
            num_target_blocks=num_blocks,
        ),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _memory_bytes(settings: ServingSettings, placement: Placement) -> int:
    """Return one rank's bytes. The same on all of them: GPUs may differ, and every rank's pools have as many blocks."""
    if settings.gpu_memory_gib:
        return int(settings.gpu_memory_gib * GIB)
    num_ranks = settings.tensor_parallel_size
    if placement.device.type == "cuda":
        first = torch.cuda.current_device() if num_ranks == 1 else 0
        devices = range(first, min(first + num_ranks, torch.cuda.device_count()))
        return int(min(torch.cuda.get_device_properties(device).total_memory for device in devices) * _GPU_SHARE)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_ranks


def check_servable(settings: ServingSettings) -> None:
    """Refuse what loading would refuse before it reads a weight.

    Raises:
        ConfigError, CheckpointError: the settings or files cannot be served, or do not fit the memory.
    """
    placement = place(settings)
    checkpoints = Checkpoints.open(settings, placement)
    checkpoints.check_ranks(settings.tensor_parallel_size)
    memory_plan(settings, checkpoints, placement)
