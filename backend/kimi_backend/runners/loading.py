"""Server settings -> loaded runners: one in each of two processes, or both in one."""

import logging
import os
from dataclasses import dataclass

import torch

from kimi_backend.checkpoint.loading import DraftCheckpoint, TargetCheckpoint
from kimi_backend.checkpoint.progress import count_progress
from kimi_backend.config.draft_config import DraftOverrides, Eagle3MlaDraftConfig
from kimi_backend.config.memory_plan import GIB, MemoryPlan, MemorySettings, plan_memory
from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ConfigError
from kimi_backend.models.eagle3_draft import Eagle3Draft
from kimi_backend.models.eagle3_mha import Eagle3MhaDraft
from kimi_backend.models.eagle3_mla import Eagle3MlaDraft
from kimi_backend.models.kimi_k25 import EmbedAndHead, KimiTarget, load_embed_and_head, target_loader
from kimi_backend.parallel import SingleRank
from kimi_backend.runners.aux_buffer import AuxBuffer
from kimi_backend.runners.draft_choice import chosen_draft, head_format, linear_format
from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.runners.graphs.recorder import GraphRecorder
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.runners.target_runner import TargetRunner
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.pretending import with_synthetic_acceptance, with_uniform_routing

logger = logging.getLogger("kimi_backend.runners")

_DEVICES_OF_KERNELS = {"reference": ("cpu", "cuda"), "cpu": ("cpu",), "triton": ("cuda",)}
_STEPS_IN_FLIGHT = 1
"""The engine sends a step after it has the reply to the one before."""
_GPU_SHARE = 0.92
_CPU_KV_BYTES = GIB // 4
"""What both pools may take of a machine's own memory where `kv_tokens` does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where and with what a model computes."""

    device: torch.device
    kernels: KernelSet
    dtype: torch.dtype
    kv_dtype: torch.dtype


def place(settings: ServingSettings) -> Placement:
    """Resolve every "auto", and take as many CPU threads as the settings say.

    Raises:
        ConfigError: a GPU is asked for and there is none, or the kernels cannot run on the device.
    """
    has_gpu = torch.cuda.is_available()
    name = settings.device if settings.device != "auto" else ("cuda" if has_gpu else "cpu")
    if name == "cuda" and not has_gpu:
        raise ConfigError("setting device: cuda given, but torch sees no GPU here; cpu is allowed")
    if settings.tensor_parallel_size > 1:
        raise ConfigError(
            f"setting tensor_parallel_size: {settings.tensor_parallel_size} given; this version serves with 1"
        )
    chosen = settings.kernels if settings.kernels != "auto" else ("triton" if name == "cuda" else "cpu")
    if name not in _DEVICES_OF_KERNELS[chosen]:
        allowed = " or ".join(kernels for kernels, devices in _DEVICES_OF_KERNELS.items() if name in devices)
        raise ConfigError(f"setting kernels: {chosen} given, which does not run on {name}; {allowed} is allowed there")
    if name == "cpu":
        torch.set_num_threads(settings.cpu_threads)
    kernels: KernelSet = getattr(KernelSet, chosen)()
    dtype = torch.bfloat16 if chosen == "triton" else torch.float32
    kv_dtype = _kv_dtype(settings, dtype, chosen)
    return Placement(device=torch.device(name), kernels=kernels, dtype=dtype, kv_dtype=kv_dtype)


def _kv_dtype(settings: ServingSettings, dtype: torch.dtype, kernels: str) -> torch.dtype:
    if settings.kv_cache_dtype == "auto":
        return dtype
    if settings.kv_cache_dtype != "fp8":
        kv_dtype: torch.dtype = getattr(torch, settings.kv_cache_dtype)
        return kv_dtype
    if kernels != "triton":
        raise ConfigError(
            f"setting kv_cache_dtype: fp8 given, which the {kernels} kernels do not serve; auto is allowed"
        )
    return torch.float8_e4m3fn


def draft_overrides(settings: ServingSettings) -> DraftOverrides:
    """What the operator sets against the draft's config.json.

    Raises:
        ConfigError: aux_layer_ids is not a list of integers.
    """
    flags = {"": None, "true": True, "false": False}
    return DraftOverrides(
        rope_theta=settings.draft_rope_theta or None,
        beta_fast=settings.draft_beta_fast or None,
        interleaved=flags[settings.draft_interleaved],
        fc_norm=flags[settings.draft_fc_norm],
        norm_output=flags[settings.draft_norm_output],
        aux_layer_ids=_parse_layer_ids(settings.aux_layer_ids),
    )


def _parse_layer_ids(text: str) -> tuple[int, ...] | None:
    if not text:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"setting aux_layer_ids: {text!r} given, integers separated by commas are needed") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checkpoints:
    target: TargetCheckpoint
    draft: DraftCheckpoint | None

    @classmethod
    def open(cls, settings: ServingSettings, placement: Placement) -> "_Checkpoints":
        if not settings.checkpoint:
            raise ConfigError("setting checkpoint: empty, the folder of a checkpoint is needed")
        for pretence in settings.pretences:
            logger.warning("pretence=%r, for timing only", pretence)
        if settings.load_format == "dummy":
            return cls._dummy(settings, placement.device)
        target = TargetCheckpoint.open(settings.checkpoint)
        if not settings.draft:
            return cls(target=target, draft=None)
        draft = DraftCheckpoint.open(settings.draft, target.config, draft_overrides(settings))
        return cls(target=target, draft=chosen_draft(settings, draft, target))

    @classmethod
    def _dummy(cls, settings: ServingSettings, device: torch.device) -> "_Checkpoints":
        target = TargetCheckpoint.dummy(settings.checkpoint, device)
        if not settings.draft:
            return cls(target=target, draft=None)
        draft = DraftCheckpoint.dummy(settings.draft, target.config, device, draft_overrides(settings))
        return cls(target=target, draft=chosen_draft(settings, draft, target))


def memory_plan(settings: ServingSettings, checkpoints: _Checkpoints, placement: Placement) -> MemoryPlan:
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
            per_token += draft.kv_bytes_per_token(_name(placement.kv_dtype), 1)
        longest = settings.max_model_len or target.max_position_embeddings
        fitting = _CPU_KV_BYTES // (per_token * settings.block_size)
        num_blocks = max(-(-longest // settings.block_size), min(fitting, settings.max_num_seqs * longest))
    return plan_memory(
        target,
        draft,
        MemorySettings(
            gpu_bytes=_memory_bytes(settings, placement),
            block_size=settings.block_size,
            kv_cache_dtype=_name(placement.kv_dtype),
            weight_dtype=_name(placement.dtype),
            draft_format=linear_format(settings),
            draft_head_format=head_format(settings),
            keeps_quantized_experts=placement.kernels.name == "triton",
            max_model_len=settings.max_model_len,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_sampled_rows=settings.max_num_seqs * (settings.max_speculative_tokens + 1 if draft else 1),
            max_num_seqs=settings.max_num_seqs,
            captures_steps=_captures(settings, placement),
            overhead_bytes=3 * GIB if on_gpu else 0,
            num_target_blocks=num_blocks,
        ),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _memory_bytes(settings: ServingSettings, placement: Placement) -> int:
    if settings.gpu_memory_gib:
        return int(settings.gpu_memory_gib * GIB)
    if placement.device.type == "cuda":
        return int(torch.cuda.get_device_properties(placement.device).total_memory * _GPU_SHARE)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limits(settings: ServingSettings, plan: MemoryPlan) -> RunnerLimits:
    return RunnerLimits(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=plan.max_model_len,
        max_speculative_tokens=settings.max_speculative_tokens if settings.draft else 0,
        capture_batch_sizes=_parse_sizes(settings.capture_batch_sizes),
    )


def _parse_sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) if part.strip().isdecimal() else 0 for part in text.split(",")) if text else ()
    if 0 in sizes:
        raise ConfigError(
            f"setting capture_batch_sizes: {text!r} given, numbers from 1 up separated by commas are needed"
        )
    return sizes


def _recorder(settings: ServingSettings, placement: Placement) -> GraphRecorder | None:
    """CUDA graphs, where the kernels never wait for the device."""
    return GraphRecorder(placement.device) if _captures(settings, placement) else None


def _captures(settings: ServingSettings, placement: Placement) -> bool:
    on_gpu = placement.device.type == "cuda" and placement.kernels.name == "triton"
    return on_gpu and settings.enforce_eager == "false"


def _warm_up(runner: TargetRunner | DraftRunner) -> None:
    # What packing the weights took for a moment is for the steps now, and for the other process.
    torch.cuda.empty_cache()
    role = runner.describe().role
    with count_progress(f"warming up the {role}", runner.num_warm_up_steps) as advance:
        runner.warm_up(advance)


def _load_target(
    settings: ServingSettings, checkpoints: _Checkpoints, placement: Placement, recorder: GraphRecorder | None
) -> tuple[TargetRunner, KimiTarget]:
    plan = memory_plan(settings, checkpoints, placement)
    kernels = _target_kernels(settings, placement)
    with checkpoints.target.loading() as tensors:
        model = KimiTarget(checkpoints.target.config, tensors, kernels, SingleRank(), placement.device, placement.dtype)
    pool = KvPool.allocate(
        model.kv_pool_shape,
        plan.num_target_blocks,
        settings.block_size,
        placement.kv_dtype,
        placement.device,
        _kv_scale(settings, placement.kv_dtype),
    )
    aux_layer_ids = checkpoints.draft.config.aux_layer_ids if checkpoints.draft else ()
    limits = _limits(settings, plan)
    runner = TargetRunner(
        model,
        kernels,
        pool,
        limits,
        aux_layer_ids,
        pretences=settings.pretences,
        aux_buffer=_aux_buffer(model, aux_layer_ids, limits, placement),
        recorder=recorder,
    )
    _warm_up(runner)
    return runner, model


def _aux_buffer(
    model: KimiTarget, aux_layer_ids: tuple[int, ...], limits: RunnerLimits, placement: Placement
) -> AuxBuffer | None:
    """Where the target leaves aux hidden states on a GPU; None without a draft, and on a CPU, where tensors do."""
    if not aux_layer_ids or placement.device.type != "cuda":
        return None
    width = len(aux_layer_ids) * model.config.hidden_size
    return AuxBuffer.allocate(_STEPS_IN_FLIGHT, limits.max_num_batched_tokens, width, placement.dtype, placement.device)


def _target_kernels(settings: ServingSettings, placement: Placement) -> KernelSet:
    """The kernel set, pretending where the settings say so."""
    kernels = placement.kernels
    if settings.routing == "uniform":
        kernels = with_uniform_routing(kernels)
    if settings.synthetic_acceptance:
        kernels = with_synthetic_acceptance(kernels, settings.synthetic_acceptance, placement.device)
    return kernels


def _target_matrices(checkpoint: TargetCheckpoint, placement: Placement) -> EmbedAndHead:
    """The target's embedding and head for a draft in another process, which cannot share them in place."""
    loader = target_loader(
        checkpoint.config, checkpoint.tensors, placement.kernels, SingleRank(), placement.device, placement.dtype
    )
    return load_embed_and_head(checkpoint.config, loader)


def _load_draft(
    settings: ServingSettings,
    checkpoints: _Checkpoints,
    placement: Placement,
    recorder: GraphRecorder | None,
    shared: EmbedAndHead | None = None,
    aux_buffer: AuxBuffer | None = None,
) -> DraftRunner:
    """shared, aux_buffer: the target's, where it is in this process."""
    checkpoint = checkpoints.draft
    if checkpoint is None:
        raise ConfigError("setting draft: empty, the folder of a draft is needed to load the draft model")
    plan = memory_plan(settings, checkpoints, placement)
    config = checkpoint.config
    with checkpoint.loading() as tensors:
        formats = linear_format(settings), head_format(settings)
        args = (tensors, placement.kernels, SingleRank(), placement.device, placement.dtype, *formats)
        model: Eagle3Draft
        if isinstance(config, Eagle3MlaDraftConfig):
            model = Eagle3MlaDraft(config, *args)
        else:
            model = Eagle3MhaDraft(config, *args)
    if shared is None and not {"embed_tokens.weight", "lm_head.weight"} <= checkpoint.tensors.names():
        shared = _target_matrices(checkpoints.target, placement)
    if shared is not None:
        model.set_embed_and_head(shared)
    takes_float8 = isinstance(config, Eagle3MlaDraftConfig)
    kv_dtype = placement.kv_dtype if takes_float8 or placement.kv_dtype.itemsize > 1 else placement.dtype
    pool = KvPool.allocate(
        model.kv_pool_shape,
        plan.num_draft_blocks,
        settings.block_size,
        kv_dtype,
        placement.device,
        _kv_scale(settings, kv_dtype),
    )
    runner = DraftRunner(
        model,
        placement.kernels,
        pool,
        _limits(settings, plan),
        placement.dtype,
        pretences=settings.pretences,
        aux_buffer=aux_buffer,
        recorder=recorder,
    )
    _warm_up(runner)
    return runner


def _kv_scale(settings: ServingSettings, kv_dtype: torch.dtype) -> float:
    return settings.kv_scale if kv_dtype.itemsize == 1 else 1.0


def load_target_runner(settings: ServingSettings) -> TargetRunner:
    """Load the target alone.

    Raises:
        ConfigError, CheckpointError: the settings or files cannot be served.
    """
    placement = place(settings)
    checkpoints = _Checkpoints.open(settings, placement)
    return _load_target(settings, checkpoints, placement, _recorder(settings, placement))[0]


def load_draft_runner(settings: ServingSettings) -> DraftRunner:
    """Load the draft alone; matrices that its file lacks come from the target's files. Raises likewise."""
    placement = place(settings)
    return _load_draft(settings, _Checkpoints.open(settings, placement), placement, _recorder(settings, placement))


def load_pair(settings: ServingSettings) -> tuple[TargetRunner, DraftRunner | None]:
    """Both in this process, the draft sharing the target's matrices where it can; None without a draft."""
    placement = place(settings)
    checkpoints = _Checkpoints.open(settings, placement)
    recorder = _recorder(settings, placement)
    target, model = _load_target(settings, checkpoints, placement, recorder)
    if checkpoints.draft is None:
        return target, None
    shared = model.get_embed_and_head()
    return target, _load_draft(settings, checkpoints, placement, recorder, shared, target.aux_buffer)
