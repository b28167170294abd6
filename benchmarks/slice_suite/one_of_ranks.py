"""Rank 0 of a tensor-parallel group, alone: a rank's slices of all weights, collectives without the other ranks.

The kernels that exchange rows between GPUs run as they do in a group, on this GPU's memory alone: the receive buffer of
rank r begins r slots into this rank's own, so what is written to rank r lands where rank r's elements are waited for.
The others seem to send what this rank sends, at once: the same elements, or in a sum in two shots the block that is
theirs to sum. What is written, emptied, read and added is what a rank writes, empties, reads and adds; the way over
NVLink is missing, and `pause_us` stands for it: so much longer each collective takes. What NCCL would do (long prompts,
and one pair of numbers a row for a draft's head) is a few tensor operations.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist

from kimi_backend.config.settings import ServingSettings
from kimi_backend.parallel import DistributedRanks
from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.runners.load.loading import Role, load_rank
from kimi_backend.runners.load.opened_checkpoints import Checkpoints
from kimi_backend.runners.load.placement import place
from kimi_backend.runners.receive_buffers import (
    MOST_GATHERED_BYTES,
    MOST_ONE_SHOT_BYTES,
    MOST_SUMMED_BYTES,
    EitherAllReduce,
    EitherAllReduceNorm,
)
from kimi_backend.runners.target_runner import TargetRunner
from kimi_kernels.collectives.op import AllReduceNorm, Collective
from kimi_kernels.collectives.receive_buffers import (
    MOST_PROGRAMS,
    NUM_SECTIONS,
    ReceiveBuffers,
    blocks_of,
    new_receive_buffer,
)
from kimi_kernels.moe_experts.op import Terms

MOST_UNEVEN_BYTES = 1 << 20
"""Sums of blocks that the ranks cannot share evenly are sent whole up to here: a rank that sums none sends no terms,
and in this rank's own memory they would be waited for."""
NO_GROUP = cast("dist.ProcessGroup", None)

Pause = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OneOfRanks(DistributedRanks):
    """Rank 0 of `num_ranks`; see the module."""

    num_ranks: int
    pause: Pause
    """Runs behind each collective."""
    memory: tuple[torch.Tensor, ...] = ()
    """Receive buffers, which kernels know by their addresses only."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return self.num_ranks

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """size * x, rounded once, or in two shots each run of `size` blocks summed; integers, of which the other ranks
        send zeros, as they are."""
        if not x.is_floating_point():
            return x
        fast = self.fast_all_reduce
        total = fast(x) if fast is not None and fast.takes(x) else (x.float() * self.size).to(x.dtype)
        self.pause()
        return total

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, columns] -> [rows, size * columns]: x beside itself."""
        if self.fast_all_gather is None or not self.fast_all_gather.takes(x):
            return DistributedRanks.all_gather_columns(self, x)
        gathered = self.fast_all_gather(x)
        self.pause()
        return gathered

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.expand(self.size, *x.shape).contiguous()
        self.pause()
        return gathered


@dataclass(frozen=True, slots=True)
class PausedAllReduceNorm:
    """A sum with its norm, and the pause behind; in two shots, only where each rank sums as many blocks as this one."""

    one_shot: AllReduceNorm
    two_shot: AllReduceNorm
    num_ranks: int
    pause: Pause

    def takes(self, x: Terms) -> bool:
        from kimi_kernels.collectives.kernel_norm import ROW_BLOCKS

        is_even = x.shape[0] * ROW_BLOCKS % self.num_ranks == 0
        return self.one_shot.takes(x) or (is_even and self.two_shot.takes(x))

    def __call__(
        self,
        x: Terms,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        second: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = EitherAllReduceNorm(self.one_shot, self.two_shot)(x, residual, weight, eps, second)
        self.pause()
        return normed


@dataclass(frozen=True, slots=True)
class _EvenTwoShot:
    """Sums in two shots of which each rank sums as many blocks as this one."""

    sums: Collective
    num_ranks: int

    def takes(self, x: torch.Tensor) -> bool:
        return self.sums.takes(x) and blocks_of(x.nbytes) % self.num_ranks == 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.sums(x)


def one_of_ranks(num_ranks: int, device: torch.device, pause_us: float) -> OneOfRanks:
    """Rank 0 of `num_ranks` on a device; on a CPU without kernels and pauses.

    Raises:
        ValueError: a number of ranks that `kimi_kernels.collectives` does not serve on a GPU.
    """
    if device.type != "cuda":
        return OneOfRanks(NO_GROUP, num_ranks=num_ranks, pause=lambda: None)
    if num_ranks not in MOST_ONE_SHOT_BYTES:
        raise ValueError(f"--rank-of: {num_ranks} given, one of {sorted(MOST_ONE_SHOT_BYTES)} is needed on a GPU")
    from slice_suite.pause_kernel import pausing

    return looped_back(num_ranks, device, pausing(pause_us, device))


def looped_back(num_ranks: int, device: torch.device, pause: Pause, most_programs: int | None = None) -> OneOfRanks:
    """Rank 0 with the kernels of a group, over receive buffers that are all in this rank's memory.

    most_programs: of a call; their own choice if absent. Programs wait for one another's elements.
    """
    # A CPU may do without Triton-language.
    from kimi_kernels.collectives.kernel import AllGather, AllReduce
    from kimi_kernels.collectives.kernel_norm import FusedAllReduceNorm

    memory = []

    def buffers(dtype: torch.dtype, num_blocks: int, two_shot: bool = False) -> ReceiveBuffers:
        memory.append(new_receive_buffer(dtype, num_ranks, num_blocks, device, two_shot=two_shot))
        addresses = shifted(memory[-1], (2 if two_shot else 1) * NUM_SECTIONS * num_ranks, num_ranks)
        return ReceiveBuffers(0, addresses, dtype, num_blocks, device, two_shot=two_shot)

    one_shot_blocks = blocks_of(MOST_ONE_SHOT_BYTES[num_ranks])
    one_shot = AllReduce(buffers(torch.int16, one_shot_blocks), most_programs)
    uneven = AllReduce(buffers(torch.int16, blocks_of(MOST_UNEVEN_BYTES)), most_programs)
    gather = AllGather(buffers(torch.int32, blocks_of(MOST_GATHERED_BYTES // num_ranks)), most_programs)
    two_shot = AllReduce(buffers(torch.int16, blocks_of(MOST_SUMMED_BYTES), two_shot=True), most_programs)
    sums = EitherAllReduce(one_shot, EitherAllReduce(_EvenTwoShot(two_shot, num_ranks), uneven))
    norm = PausedAllReduceNorm(
        FusedAllReduceNorm(buffers(torch.int16, one_shot_blocks)),
        FusedAllReduceNorm(buffers(torch.int16, MOST_PROGRAMS[num_ranks], two_shot=True)),
        num_ranks,
        pause,
    )
    return OneOfRanks(NO_GROUP, sums, gather, norm, num_ranks=num_ranks, pause=pause, memory=tuple(memory))


def shifted(buffer: torch.Tensor, num_slots: int, num_ranks: int) -> list[int]:
    """Place the ranks' receive buffers: each begins a slot behind the one before."""
    return [buffer.data_ptr() + rank * (buffer.nbytes // num_slots) for rank in range(num_ranks)]


def load_one_of_ranks(
    settings: ServingSettings, num_ranks: int, pause_us: float
) -> tuple[TargetRunner, DraftRunner | None]:
    """Both runners of rank 0.

    Args:
        settings: with tensor_parallel_size 1, as this is one process.
    Raises:
        ConfigError: the ranks cannot divide the models.
    """
    placement = place(settings)
    settings = replace(settings, tensor_parallel_size=num_ranks)
    checkpoints = Checkpoints.open(settings, placement)
    checkpoints.check_ranks(num_ranks)
    group = one_of_ranks(num_ranks, placement.device, pause_us)
    target, draft = load_rank(settings, Role.PAIR, placement, checkpoints, group)
    assert target is not None
    return target, draft
