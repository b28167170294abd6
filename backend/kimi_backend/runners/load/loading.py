"""Server settings -> loaded runners: one in each of two processes, or both in one."""

import enum

import torch

from kimi_backend.checkpoint.loading import TargetCheckpoint
from kimi_backend.checkpoint.progress import count_progress
from kimi_backend.config.draft_config import Eagle3MlaDraftConfig
from kimi_backend.config.memory_plan import MemoryPlan
from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ConfigError
from kimi_backend.models.eagle3_draft import Eagle3Draft
from kimi_backend.models.eagle3_mha import Eagle3MhaDraft
from kimi_backend.models.eagle3_mla import Eagle3MlaDraft
from kimi_backend.models.kimi_k25 import EmbedAndHead, KimiTarget, load_embed_and_head, target_loader
from kimi_backend.parallel import SingleRank, TensorParallelGroup
from kimi_backend.runners.aux_buffer import AuxBuffer
from kimi_backend.runners.cost_file import CostFile
from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.runners.graphs.recorder import GraphRecorder
from kimi_backend.runners.hand_over.token_table import TokenTable, share
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.load.draft_choice import head_format, linear_format
from kimi_backend.runners.load.opened_checkpoints import Checkpoints, memory_plan
from kimi_backend.runners.load.placement import Placement, captures_steps, place
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.runners.ranks.worker_processes import WorkerProcesses
from kimi_backend.runners.ranks.workers import NO_WORKERS, Workers
from kimi_backend.runners.target_runner import TargetRunner
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.synthetic_sets import with_synthetic_acceptance, with_uniform_routing

_STEPS_IN_FLIGHT = 1
"""A verify is run after the draft step that reads what the one before left, in one process and between two."""


class Role(str, enum.Enum):
    """The models that a process loads."""

    TARGET = "target"
    DRAFT = "draft"
    PAIR = "pair"


def _limits(settings: ServingSettings, plan: MemoryPlan) -> RunnerLimits:
    return RunnerLimits(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=plan.max_model_len,
        max_speculative_tokens=settings.most_draft_tokens,
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
    return GraphRecorder(placement.device) if captures_steps(settings, placement) else None


def _warm_up(runner: TargetRunner | DraftRunner) -> None:
    # What packing the weights took for a moment is for the steps now, and for the other process.
    torch.cuda.empty_cache()
    role = runner.describe().role
    with count_progress(f"warming up the {role}", runner.num_warm_up_steps) as advance:
        runner.warm_up(advance)


def _load_target(
    settings: ServingSettings,
    checkpoints: Checkpoints,
    placement: Placement,
    recorder: GraphRecorder | None,
    group: TensorParallelGroup,
    workers: Workers,
    *,
    is_split: bool,
) -> tuple[TargetRunner, KimiTarget]:
    """is_split: whether the draft is in another process."""
    plan = memory_plan(settings, checkpoints, placement)
    kernels = _target_kernels(settings, placement)
    with checkpoints.target.loading() as tensors:
        model = KimiTarget(checkpoints.target.config, tensors, kernels, group, placement.device, placement.dtype)
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
        synthetic_parts=settings.synthetic_parts,
        aux_buffer=_aux_buffer(model, aux_layer_ids, limits, placement),
        recorder=recorder,
        group=group,
        workers=workers,
        table=TokenTable.allocate(limits, placement.device, is_split=is_split) if recorder else None,
        cost_file=CostFile.of("target", settings, (model.config, limits), placement.device),
    )
    _warm_up(runner)
    return runner, model


def _aux_buffer(
    model: KimiTarget, aux_layer_ids: tuple[int, ...], limits: RunnerLimits, placement: Placement
) -> AuxBuffer | None:
    """The target's buffer of aux hidden states on a GPU; None without a draft, and on a CPU, where tensors do."""
    if not aux_layer_ids or placement.device.type != "cuda":
        return None
    width = len(aux_layer_ids) * model.config.hidden_size
    return AuxBuffer.allocate(_STEPS_IN_FLIGHT, limits.max_num_batched_tokens, width, placement.dtype, placement.device)


def _target_kernels(settings: ServingSettings, placement: Placement) -> KernelSet:
    """The kernel set, with synthetic routing and acceptance where the settings say so."""
    kernels = placement.kernels
    if settings.routing == "uniform":
        kernels = with_uniform_routing(kernels)
    acceptance = settings.accepted_chances or settings.synthetic_acceptance
    if acceptance:
        kernels = with_synthetic_acceptance(kernels, acceptance, placement.device)
    return kernels


def _target_matrices(checkpoint: TargetCheckpoint, placement: Placement, group: TensorParallelGroup) -> EmbedAndHead:
    """The target's embedding and head for a draft in another process, which cannot share them in place."""
    loader = target_loader(
        checkpoint.config, checkpoint.tensors, placement.kernels, group, placement.device, placement.dtype
    )
    return load_embed_and_head(checkpoint.config, loader)


def _load_draft(
    settings: ServingSettings,
    checkpoints: Checkpoints,
    placement: Placement,
    recorder: GraphRecorder | None,
    group: TensorParallelGroup,
    workers: Workers,
    shared: EmbedAndHead | None = None,
    aux_buffer: AuxBuffer | None = None,
    table: TokenTable | None = None,
) -> DraftRunner:
    """shared, aux_buffer, table: the target's, where it is in this process."""
    checkpoint = checkpoints.draft
    if checkpoint is None:
        raise ConfigError("setting draft: empty, the folder of a draft is needed to load the draft model")
    plan = memory_plan(settings, checkpoints, placement)
    config = checkpoint.config
    with checkpoint.loading() as tensors:
        formats = linear_format(settings), head_format(settings)
        args = (tensors, placement.kernels, group, placement.device, placement.dtype, *formats)
        model: Eagle3Draft
        if isinstance(config, Eagle3MlaDraftConfig):
            model = Eagle3MlaDraft(config, *args)
        else:
            model = Eagle3MhaDraft(config, *args)
    if shared is None and not {"embed_tokens.weight", "lm_head.weight"} <= checkpoint.tensors.names():
        shared = _target_matrices(checkpoints.target, placement, group)
    if shared is not None:
        model.set_embed_and_head(shared)
    pool = KvPool.allocate(
        model.kv_pool_shape,
        plan.num_draft_blocks,
        settings.block_size,
        placement.kv_dtype,
        placement.device,
        _kv_scale(settings, placement.kv_dtype),
    )
    limits = _limits(settings, plan)
    if table is None and recorder is not None:
        table = TokenTable.allocate(limits, placement.device, is_split=True)
    runner = DraftRunner(
        model,
        placement.kernels,
        pool,
        limits,
        placement.dtype,
        synthetic_parts=settings.synthetic_parts,
        aux_buffer=aux_buffer,
        recorder=recorder,
        group=group,
        workers=workers,
        table=table,
        cost_file=CostFile.of("draft", settings, (config, limits), placement.device),
    )
    _warm_up(runner)
    return runner


def _kv_scale(settings: ServingSettings, kv_dtype: torch.dtype) -> float:
    return settings.kv_scale if kv_dtype.itemsize == 1 else 1.0


def load_rank(
    settings: ServingSettings,
    role: Role,
    placement: Placement,
    checkpoints: Checkpoints,
    group: TensorParallelGroup,
    workers: Workers = NO_WORKERS,
) -> tuple[TargetRunner | None, DraftRunner | None]:
    """This rank's part of what the role says, warmed up: all ranks do this at the same time.

    Args:
        workers: of rank 0, the others.
    """
    recorder = _recorder(settings, placement)
    ranks = recorder, group, workers
    # What is summed first loads its kernel, which must not be while a stream waits for another process.
    share(torch.zeros(1, dtype=torch.int32, device=placement.device), group)
    if role is Role.DRAFT:
        return None, _load_draft(settings, checkpoints, placement, *ranks)
    target, model = _load_target(settings, checkpoints, placement, *ranks, is_split=role is Role.TARGET)
    if role is Role.TARGET or checkpoints.draft is None:
        return target, None
    # In one process the draft shares the target's matrices where it can.
    shared = model.get_embed_and_head()
    return target, _load_draft(settings, checkpoints, placement, *ranks, shared, target.aux_buffer, target.table)


def _load(settings: ServingSettings, role: Role) -> tuple[TargetRunner | None, DraftRunner | None]:
    placement = place(settings)
    checkpoints = Checkpoints.open(settings, placement)
    if settings.tensor_parallel_size == 1:
        return load_rank(settings, role, placement, checkpoints, SingleRank())
    # What is wrong with the settings is found before any process is started.
    checkpoints.check_ranks(settings.tensor_parallel_size)
    memory_plan(settings, checkpoints, placement)
    workers = WorkerProcesses(settings, role.value)
    with workers.loading():
        group = workers.join(placement.device)
        loaded = load_rank(settings, role, placement, checkpoints, group, workers)
    for runner in loaded:
        if runner is not None:
            workers.before_leaving(runner.drop_captures)
    return loaded


def load_target_runner(settings: ServingSettings) -> TargetRunner:
    """Load the target alone.

    Raises:
        ConfigError, CheckpointError: the settings or files cannot be served.
    """
    target, _ = _load(settings, Role.TARGET)
    assert target is not None
    return target


def load_draft_runner(settings: ServingSettings) -> DraftRunner:
    """Load the draft alone; matrices that its file lacks come from the target's files. Raises likewise."""
    _, draft = _load(settings, Role.DRAFT)
    assert draft is not None
    return draft


def load_pair(settings: ServingSettings) -> tuple[TargetRunner, DraftRunner | None]:
    """Both in this process, the draft sharing the target's matrices where it can; None without a draft."""
    target, draft = _load(settings, Role.PAIR)
    assert target is not None
    return target, draft
