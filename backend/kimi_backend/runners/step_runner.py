"""The common part of a target's runner and a draft's."""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypedDict, TypeVar

import torch

from kimi_backend.checkpoint.progress import count_progress, no_progress
from kimi_backend.config.draft_config import Eagle3DraftConfig
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.parallel import SingleRank, TensorParallelGroup
from kimi_backend.runners.aux_buffer import AuxBuffer
from kimi_backend.runners.cost_file import CostFile
from kimi_backend.runners.device_name import device_name
from kimi_backend.runners.graphs.recorder import Recorder
from kimi_backend.runners.hand_over.token_table import TokenTable
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.metadata_builder import MetadataBuilder
from kimi_backend.runners.plan_checks import PlanChecker, RunnerLimits
from kimi_backend.runners.ranks.workers import NO_WORKERS, Workers
from kimi_backend.runners.sampling_tensors import SamplingUpload
from kimi_backend.runners.step_timing import Sequences, fewest_passes, shapes_of, time_steps
from kimi_backend.runners.warm_up import prefill_lengths
from kimi_backend.spec_decode.protocols import Pending
from kimi_backend.types.plan import RowPlan, RunnerDescription
from kimi_backend.types.step_costs import StepCosts
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.token_table import token_table_ops

logger = logging.getLogger("kimi_backend.runners")

MOST_WAITING = 0.2
"""The share of the time of timing steps that the process may wait for a processor for their costs to be kept. Other
programs do not slow all shapes alike, and the next starts would take it for this machine."""

Tensors = dict[str, torch.Tensor]
Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True)
class Launched(Generic[Reply]):
    """A step that is queued."""

    finish: Callable[[], Reply]

    def wait(self) -> Reply:
        """See `Pending.wait`."""
        return self.finish()


class Graphs(Protocol):
    """Captured steps of either model."""

    @property
    def num_buckets(self) -> int: ...

    def warm_up(self, advance: Callable[[int], None]) -> None: ...


class Options(TypedDict, total=False):
    """The options that either runner may be given by name."""

    split_tokens: int
    """See `kimi_kernels.mla_decode.op.PlanMlaDecode`."""
    synthetic_parts: tuple[str, ...]
    """The parts that the description says are not real."""
    aux_buffer: AuxBuffer | None
    """The target's, in which steps leave aux hidden states, and a draft's plans name a region; without one, tensors."""
    recorder: Recorder | None
    """Makes steps repeatable, once `warm_up` has run; None runs every step eagerly."""
    group: TensorParallelGroup | None
    """The model's."""
    workers: Workers
    """The other ranks, of rank 0."""
    table: TokenTable | None
    """Shared by both runners of a process; one that captures makes one of its own without it."""
    cost_file: CostFile | None
    """The file in which step costs are kept from one start to the next; None keeps them nowhere."""


class StepRunner:
    """Weights, KV and captured steps; nothing about sequences.

    With tensor parallelism every rank runs the same plan: rank 0's runner checks it and tells its workers.
    """

    def __init__(
        self,
        config: KimiModelConfig | Eagle3DraftConfig,
        kernels: KernelSet,
        pool: KvPool,
        limits: RunnerLimits,
        num_mla_heads: int | None,
        options: Options,
    ) -> None:
        """
        Args:
            pool: of the model's `kv_pool_shape`, on its device.
        """
        limits.check_positions(config.max_position_embeddings)
        self.workers = options.get("workers", NO_WORKERS)
        """The other ranks, of rank 0."""
        self._group = options.get("group") or SingleRank()
        self._kernels, self._pool, self._limits = kernels, pool, limits
        self.device = pool.tensor.device
        """The device that this runner computes on."""
        self.aux_buffer = options.get("aux_buffer")
        """The buffer in which the target's steps leave their aux hidden states; None where each makes a tensor."""
        self._recorder = options.get("recorder")
        table = options.get("table")
        if self._recorder is not None and table is None:
            table = TokenTable.allocate(limits, self.device)
        self.table = table
        """The table in which steps leave tokens for the other model; None where every step's reply is waited for."""
        self._builder = MetadataBuilder(
            kernels=kernels,
            block_size=pool.block_size,
            num_mla_heads=num_mla_heads,
            split_tokens=options.get("split_tokens", 0),
        )
        self._checker = PlanChecker(
            limits=limits,
            vocab_size=config.vocab_size,
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            has_table=table is not None,
        )
        self._vocab_size = config.vocab_size
        self._cost_file = options.get("cost_file")
        self._costs: StepCosts | None = None
        self._sampling, self._ops = SamplingUpload(self.device), token_table_ops(kernels)
        self._description = RunnerDescription(
            role="",
            runner_epoch=secrets.randbits(62),
            block_size=pool.block_size,
            num_blocks=pool.num_blocks,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            vocab_size=config.vocab_size,
            draft_vocab_size=None,
            aux_layer_ids=(),
            hidden_size=0,
            kv_cache_dtype=pool.dtype_name,
            device=device_name(self.device),
            synthetic_parts=options.get("synthetic_parts", ()),
        )

    @property
    def depth(self) -> int:
        """See `spec_decode.protocols`."""
        raise NotImplementedError

    def describe(self) -> RunnerDescription:
        """See `spec_decode.protocols`."""
        return replace(self._description, depth=self.depth)

    @torch.inference_mode()
    def warm_up(self, advance: Callable[[int], None] = no_progress) -> None:
        """Run chunks of all lengths, so that every kernel is compiled and all memory that a step takes is taken, and
        record the steps of a runner that captures. advance: called with the number of steps just done."""
        graphs = self._captured()
        if graphs is None or self._recorder is None:
            return
        chunks = [partial(self._run_idle_chunk, length) for length in prefill_lengths(self._limits)]
        self._recorder.prepare(chunks)
        for chunk in chunks:
            chunk()
            advance(1)
        graphs.warm_up(advance)

    @property
    def num_warm_up_steps(self) -> int:
        """The number of times that `warm_up` advances."""
        graphs = self._captured()
        return graphs.num_buckets + len(prefill_lengths(self._limits)) if graphs is not None else 0

    @torch.inference_mode()
    def measure_costs(self) -> StepCosts:
        """See `spec_decode.protocols`. All ranks run the steps."""
        if self._costs is None and self._cost_file is not None:
            self._costs = self._cost_file.read()
        if self._costs is None:
            self._costs, waited = self._time_steps()
            if waited > MOST_WAITING:
                logger.warning(
                    "step costs are not kept: the machine is busy, %.0f %% of the time was waiting", 100 * waited
                )
            elif self._cost_file is not None:
                self._cost_file.write(self._costs)
        return self._costs

    def _time_steps(self) -> tuple[StepCosts, float]:
        role, is_captured = self._description.role, self._captured() is not None
        sequences = Sequences(
            pool=self._pool, limits=self._limits, vocab_size=self._vocab_size, is_draft=role == "draft"
        )
        num_shapes = len(shapes_of(self._limits, is_captured=is_captured, is_draft=sequences.is_draft))
        with count_progress(f"timing steps of the {role}", fewest_passes(self.device) * num_shapes) as advance:
            return time_steps(sequences, self._launch_timed, self.device, advance, is_captured=is_captured)

    def _launch_timed(self, rows: RowPlan, num_proposals: int) -> Pending[Any]:
        """Queue a step over made-up sequences."""
        raise NotImplementedError

    def close(self) -> None:
        """End the other ranks and drop what is captured."""
        self.workers.close()
        self.drop_captures()

    def drop_captures(self) -> None:
        """Captured steps hold the collectives that they call. Only eager steps run afterwards."""
        raise NotImplementedError

    def _captured(self) -> Graphs | None:
        raise NotImplementedError

    def _run_idle_chunk(self, num_rows: int) -> None:
        raise NotImplementedError
