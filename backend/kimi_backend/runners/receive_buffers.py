"""The IPC receive buffers of `kimi_kernels.rank_exchange`: the GPUs of one host write into each other's."""

import json
import logging
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from kimi_backend.parallel import DistributedRanks, FastCollective, SumNorm
from kimi_backend.runners.cuda_ipc import CudaIpcError, OpenedMemory, export_memory
from kimi_kernels.moe_experts.op import Terms

_LOG = logging.getLogger(__name__)
MOST_SENT_WHOLE: Final = {2: 1 << 20, 4: 128 << 10, 8: 32 << 10}
"""Bytes of one rank's rows up to which each rank sends them to every other one, by the number of ranks. More are summed
in parts: each rank sends less, but twice, one after the other. Two ranks were measured (docs/performance.md): 2.6 us
and 5.3 us a MB whole, 3.9 us and 4.2 us a MB in parts, with 256 programs. The limits of 4 and 8 ranks follow."""
MOST_SUMMED_BYTES: Final = 4 << 20
"""Beyond, NCCL is about as fast."""
MOST_GATHERED_BYTES: Final = 48 << 20
"""The most bytes of all ranks' columns: float32 logits of 64 rows of 163,840. A rank has three sections of this
size."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The receive buffers of all ranks, as this process has them."""

    own: dict[str, torch.Tensor]
    """Tensors by what they are for: "sum", "parts", "norm" and "norm in parts" int16, "gather" int32."""
    opened: list[OpenedMemory]
    addresses: dict[str, list[int]]
    """The addresses of all ranks' receive buffers, in rank order."""

    def close(self) -> None:
        """Unmap the other ranks' memory, once no kernel uses it any more."""
        for memory in self.opened:
            memory.close()


@dataclass(frozen=True, slots=True)
class EitherSum:
    """The first of two sums that takes a tensor."""

    whole: FastCollective
    in_parts: FastCollective

    def takes(self, x: torch.Tensor) -> bool:
        return self.whole.takes(x) or self.in_parts.takes(x)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole(x) if self.whole.takes(x) else self.in_parts(x)


@dataclass(frozen=True, slots=True)
class EitherSumNorm:
    """The first of two that takes a tensor, as `EitherSum`."""

    whole: SumNorm
    in_parts: SumNorm

    def takes(self, x: Terms) -> bool:
        return self.whole.takes(x) or self.in_parts.takes(x)

    def __call__(
        self,
        x: Terms,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        second: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = self.whole if self.whole.takes(x) else self.in_parts
        return chosen(x, residual, weight, eps, second)


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksOnGpus(DistributedRanks):
    """Ranks that write into one another's memory."""

    shared: SharedMemory


def with_receive_buffers(group: dist.ProcessGroup, store: Store, device: torch.device) -> DistributedRanks:
    """The ranks of an NCCL group, with the collectives of `kimi_kernels.rank_exchange` where the driver shares memory.

    Every rank calls this; store: of all ranks, which exchange handles in it.
    """
    shared = share_memory(store, dist.get_rank(group), dist.get_world_size(group), device)
    return DistributedRanks(group) if shared is None else _in_shared_memory(group, shared)


def share_memory(store: Store, rank: int, size: int, device: torch.device) -> SharedMemory | None:
    """None, on every rank alike, where one of them cannot open another's memory."""
    if size not in MOST_SENT_WHOLE:
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


def _new_receive_buffers(size: int, device: torch.device) -> dict[str, torch.Tensor]:
    from kimi_kernels.rank_exchange.kernel import MOST_PROGRAMS, new_receive_buffer
    from kimi_kernels.rank_exchange.kernel_norm import new_norm_receive_buffer
    from kimi_kernels.rank_exchange.kernel_parts import new_parts_receive_buffer

    return {
        "norm": new_norm_receive_buffer(size, _most_normed_whole(size), device, in_parts=False),
        "norm in parts": new_norm_receive_buffer(size, MOST_PROGRAMS[size], device, in_parts=True),
        "sum": new_receive_buffer(torch.int16, size, _most_sent_whole(size), device),
        "parts": new_parts_receive_buffer(size, MOST_SUMMED_BYTES // 2, device),
        "gather": new_receive_buffer(torch.int32, size, _most_gathered(size), device),
    }


def _most_sent_whole(size: int) -> int:
    return MOST_SENT_WHOLE[size] // 2


def _most_normed_whole(size: int) -> int:
    """Blocks."""
    from kimi_kernels.rank_exchange.kernel_norm import BLOCK

    return _most_sent_whole(size) // BLOCK


def _most_gathered(size: int) -> int:
    return MOST_GATHERED_BYTES // size // 4


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
    from kimi_kernels.rank_exchange.kernel import MOST_PROGRAMS, RankGather, RankSum, ReceiveBuffers
    from kimi_kernels.rank_exchange.kernel_norm import RankSumNorm
    from kimi_kernels.rank_exchange.kernel_parts import RankSumInParts

    device, rank, size = shared.own["sum"].device, dist.get_rank(group), dist.get_world_size(group)
    sums = ReceiveBuffers(rank, shared.addresses["sum"], torch.int16, _most_sent_whole(size), device)
    parts = RankSumInParts(rank, shared.addresses["parts"], MOST_SUMMED_BYTES // 2, device)
    gathers = ReceiveBuffers(rank, shared.addresses["gather"], torch.int32, _most_gathered(size), device)
    norm = RankSumNorm(rank, shared.addresses["norm"], _most_normed_whole(size), device, in_parts=False)
    norm_parts = RankSumNorm(rank, shared.addresses["norm in parts"], MOST_PROGRAMS[size], device, in_parts=True)
    return RanksOnGpus(
        group,
        EitherSum(RankSum(sums), parts),
        RankGather(gathers),
        EitherSumNorm(norm, norm_parts),
        shared=shared,
    )
