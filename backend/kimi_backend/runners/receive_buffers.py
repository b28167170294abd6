"""The IPC receive buffers of `kimi_kernels.collectives`: the GPUs of one host write into each other's."""

import json
import logging
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from kimi_backend.parallel import DistributedRanks
from kimi_backend.runners.cuda_ipc import CudaIpcError, OpenedMemory, export_memory
from kimi_kernels.collectives.op import AllReduceNorm, Collective
from kimi_kernels.collectives.receive_buffers import MOST_PROGRAMS, ReceiveBuffers, blocks_of, new_receive_buffer
from kimi_kernels.moe_experts.op import Terms

_LOG = logging.getLogger(__name__)
MOST_ONE_SHOT_BYTES: Final = {2: 1 << 20, 4: 128 << 10, 8: 32 << 10}
"""Bytes of one rank's rows up to which each rank sends them to every other one, by the number of ranks. More are summed
in two shots: each rank sends less, but twice, one after the other. Two ranks were measured (docs/performance.md): 2.6
us and 5.3 us a MB in one shot, 3.9 us and 4.2 us a MB in two, with 256 programs. The limits of 4 and 8 ranks follow."""
MOST_SUMMED_BYTES: Final = 4 << 20
"""Beyond, NCCL is about as fast."""
MOST_GATHERED_BYTES: Final = 48 << 20
"""The most bytes of all ranks' columns: float32 logits of 64 rows of 163,840. A rank has three sections of this
size."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The receive buffers of all ranks, as this process has them."""

    own: dict[str, torch.Tensor]
    """Tensors by what they are for, a key of `_kinds`."""
    opened: list[OpenedMemory]
    addresses: dict[str, list[int]]
    """The addresses of all ranks' receive buffers, in rank order."""

    def close(self) -> None:
        """Unmap the other ranks' memory, once no kernel uses it any more."""
        for memory in self.opened:
            memory.close()


@dataclass(frozen=True, slots=True)
class EitherAllReduce:
    """The first of two all-reduces that takes a tensor."""

    one_shot: Collective
    two_shot: Collective

    def takes(self, x: torch.Tensor) -> bool:
        return self.one_shot.takes(x) or self.two_shot.takes(x)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.one_shot(x) if self.one_shot.takes(x) else self.two_shot(x)


@dataclass(frozen=True, slots=True)
class EitherAllReduceNorm:
    """The first of two that takes a tensor, as `EitherAllReduce`."""

    one_shot: AllReduceNorm
    two_shot: AllReduceNorm

    def takes(self, x: Terms) -> bool:
        return self.one_shot.takes(x) or self.two_shot.takes(x)

    def __call__(
        self,
        x: Terms,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        second: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = self.one_shot if self.one_shot.takes(x) else self.two_shot
        return chosen(x, residual, weight, eps, second)


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksOnGpus(DistributedRanks):
    """Ranks that write into one another's memory."""

    shared: SharedMemory


def with_receive_buffers(group: dist.ProcessGroup, store: Store, device: torch.device) -> DistributedRanks:
    """The ranks of an NCCL group, with the collectives of `kimi_kernels.collectives` where the driver shares memory.

    Every rank calls this; store: of all ranks, which exchange handles in it.
    """
    shared = share_memory(store, dist.get_rank(group), dist.get_world_size(group), device)
    return DistributedRanks(group) if shared is None else _in_shared_memory(group, shared)


def share_memory(store: Store, rank: int, size: int, device: torch.device) -> SharedMemory | None:
    """None, on every rank alike, where one of them cannot open another's memory."""
    if size not in MOST_ONE_SHOT_BYTES:
        return None
    own = _new_receive_buffers(size, device)
    torch.cuda.synchronize(device)  # they are empty before anyone sees them
    shared = SharedMemory(own=own, opened=[], addresses={name: [] for name in own})
    problem = ""
    try:
        exported = {name: _exported(buffer) for name, buffer in own.items()}
        store.set(f"receive_buffers/{rank}", json.dumps(exported))
        _open_all(shared, store, rank, size)
    except CudaIpcError as error:
        problem = f"rank {rank}: {error}"
        store.compare_set(f"receive_buffers/{rank}", "", "null")  # where it could not export its own
    store.set(f"opened/{rank}", problem or "all")
    told_by = [store.get(f"opened/{other}").decode() for other in range(size)]
    problems = [text for text in told_by if text != "all"]
    if not problems:
        return shared
    if rank == 0:
        _LOG.warning("GPUs do not share memory (%s): NCCL sums small tensors too, which takes longer", problems[0])
    shared.close()
    return None


@dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of call, as its receive buffers are made for it."""

    dtype: torch.dtype
    num_blocks: int
    two_shot: bool = False


def _kinds(size: int) -> dict[str, _Kind]:
    one_shot = blocks_of(MOST_ONE_SHOT_BYTES[size])
    return {
        "norm": _Kind(torch.int16, one_shot),
        "norm in two shots": _Kind(torch.int16, MOST_PROGRAMS[size], two_shot=True),
        "sum": _Kind(torch.int16, one_shot),
        "sum in two shots": _Kind(torch.int16, blocks_of(MOST_SUMMED_BYTES), two_shot=True),
        "gather": _Kind(torch.int32, blocks_of(MOST_GATHERED_BYTES // size)),
    }


def _new_receive_buffers(size: int, device: torch.device) -> dict[str, torch.Tensor]:
    return {
        name: new_receive_buffer(kind.dtype, size, kind.num_blocks, device, two_shot=kind.two_shot)
        for name, kind in _kinds(size).items()
    }


def _exported(buffer: torch.Tensor) -> tuple[str, int]:
    handle, offset = export_memory(buffer)
    return handle.hex(), offset


def _open_all(shared: SharedMemory, store: Store, rank: int, size: int) -> None:
    """Open all ranks', in their order. Raises CudaIpcError: the driver refuses, or a rank has nothing to open."""
    for other in range(size):
        exported = json.loads(store.get(f"receive_buffers/{other}"))
        if exported is None:
            raise CudaIpcError(f"rank {other} shares no memory")
        for name, buffer in shared.own.items():
            address = buffer.data_ptr()
            if other != rank:
                handle, offset = exported[name]
                memory = OpenedMemory(bytes.fromhex(handle), offset, buffer.nbytes, buffer.device)
                shared.opened.append(memory)
                address = memory.address
            shared.addresses[name].append(address)


def _in_shared_memory(group: dist.ProcessGroup, shared: SharedMemory) -> RanksOnGpus:
    # A CPU may do without Triton-language.
    from kimi_kernels.collectives.kernel import AllGather, AllReduce
    from kimi_kernels.collectives.kernel_norm import FusedAllReduceNorm

    device, rank, size = shared.own["sum"].device, dist.get_rank(group), dist.get_world_size(group)
    buffers = {
        name: ReceiveBuffers(rank, shared.addresses[name], kind.dtype, kind.num_blocks, device, two_shot=kind.two_shot)
        for name, kind in _kinds(size).items()
    }
    return RanksOnGpus(
        group,
        EitherAllReduce(AllReduce(buffers["sum"]), AllReduce(buffers["sum in two shots"])),
        AllGather(buffers["gather"]),
        EitherAllReduceNorm(FusedAllReduceNorm(buffers["norm"]), FusedAllReduceNorm(buffers["norm in two shots"])),
        shared=shared,
    )
