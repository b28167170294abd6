"""How the processes of a tensor-parallel group find one another, and part.

They meet at a TCP store that rank 0 opens, on the address that it is given and no other. On GPUs they also open one
another's inboxes, for `kimi_kernels.rank_exchange`; where the driver does not share them, NCCL does everything.
"""

import json
import logging
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from kimi_backend.errors import ConfigError, KimiError
from kimi_backend.parallel import DistributedRanks, FastCollective, SingleRank, TensorParallelGroup
from kimi_backend.runners.cuda_ipc import CudaIpcError, OpenedMemory, export_memory

_LOG = logging.getLogger(__name__)
MOST_SENT_WHOLE: Final = {2: 4 << 20, 4: 128 << 10, 8: 64 << 10}
"""Bytes of one rank's rows up to which each rank sends them to every other one, by the number of ranks. More are summed
in parts: each rank sends less, but twice, one after the other. Only 2 ranks were measured (docs/performance.md)."""
MOST_SUMMED_BYTES: Final = 4 << 20
"""Beyond, NCCL is about as fast."""
MOST_GATHERED_BYTES: Final = 48 << 20
"""Of all ranks' columns: the float32 logits of 64 rows of 163,840. Each rank has three inboxes of this size."""
_LOOPBACK_HOSTS = ("127.0.0.1", "localhost")


class RankError(KimiError):
    """The ranks of a tensor-parallel group did not find one another."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The inboxes of all ranks, as this process has them."""

    own: dict[str, torch.Tensor]
    """By what they are for: "sum" and "parts" int16, "gather" int32."""
    opened: list[OpenedMemory]
    addresses: dict[str, list[int]]
    """Of all ranks' inboxes, in rank order."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksOnGpus(DistributedRanks):
    """Ranks that write into one another's memory."""

    shared: SharedMemory


def join_ranks(
    rank: int,
    size: int,
    address: str,
    device: torch.device,
    *,
    listener: socket.socket | None = None,
    join_timeout_s: float = 60.0,
    collective_timeout_s: float = 600.0,
) -> TensorParallelGroup:
    """Meet the other ranks; returns when all are there. Once a process at a time.

    On a GPU this makes `device` the process's current one, and the group's communicator, which a capture could not.

    Args:
        address: "HOST:PORT" of this host that rank 0 opens.
        device: "cpu" takes gloo, "cuda:INDEX" NCCL. On a loopback address both listen on the loopback interface alone,
            unless GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME says otherwise.
        listener: rank 0's, listening at `address` already, so that nobody takes the port meanwhile; this closes it.
        join_timeout_s: how long to wait for the others.
        collective_timeout_s: after so long a rank gives up a collective outside of a CUDA graph that the others did not
            call. Nothing watches those inside: whoever started the ranks must end them all when one ends.
    Raises:
        ConfigError: a rank that is not in [0, size), an address or a device that is none of these.
        RankError: a rank did not come in time, or the address is taken.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"rank: {rank} given, of {size} ranks; allowed: 0 to {size - 1}")
    if device.type == "cuda" and device.index is None:
        raise ConfigError(f"device: {device} given for rank {rank}; one with its index is allowed, such as cuda:{rank}")
    if size == 1:
        return SingleRank()
    if dist.is_initialized():
        raise ConfigError("tensor parallel ranks: this process has joined some already; leave them first")
    store = _meet(rank, size, address, listener, join_timeout_s)
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if is_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=collective_timeout_s),
        device_id=device if is_gpu else None,
    )
    assert dist.group.WORLD is not None
    shared = _share_memory(store, rank, size, device) if is_gpu else None
    if shared is None:
        return DistributedRanks(dist.group.WORLD)
    return _with_inboxes(dist.group.WORLD, rank, shared)


def leave(group: TensorParallelGroup) -> None:
    """Part from the other ranks, which leave as well. Graphs that hold the group's collectives must be gone before.

    A process whose peers are gone should end instead: parting may wait for them.
    """
    if not isinstance(group, DistributedRanks) or not dist.is_initialized():
        return
    if isinstance(group, RanksOnGpus):
        dist.barrier(group.group)  # nobody writes into memory that is being unmapped
        group.shared.close()
    dist.destroy_process_group()


def _meet(rank: int, size: int, address: str, listener: socket.socket | None, timeout_s: float) -> TCPStore:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not host:
        raise ConfigError(f"address of the ranks: {address!r} given; HOST:PORT is allowed")
    if host in _LOOPBACK_HOSTS:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=timeout_s)
    try:
        # torch would listen on every interface.
        listening = (listener or socket.create_server((host, int(port)))).detach() if rank == 0 else None
    except OSError as error:
        raise RankError(f"rank 0 cannot listen on {address}: {error}") from None
    try:
        store = TCPStore(host, int(port), size, rank == 0, timeout, wait_for_workers=False, master_listen_fd=listening)
    except RuntimeError as error:
        raise RankError(f"rank {rank} did not find rank 0 at {address} in {timeout_s:g} s: {error}") from None
    store.set(_here(rank), "here")
    try:
        store.wait([_here(other) for other in range(size)], timeout)
    except RuntimeError:
        raise RankError(_who_is_missing(store, rank, size, address, timeout_s)) from None
    return store


def _who_is_missing(store: TCPStore, rank: int, size: int, address: str, timeout_s: float) -> str:
    try:
        missing = [other for other in range(size) if not store.check([_here(other)])]
    except RuntimeError:
        return f"rank {rank} lost rank 0 at {address}"
    return f"rank {rank} at {address}: after {timeout_s:g} s these of {size} ranks were not there: {missing}"


def _here(rank: int) -> str:
    return f"here/{rank}"


def _share_memory(store: Store, rank: int, size: int, device: torch.device) -> SharedMemory | None:
    """None, on every rank alike, where one of them cannot open another's memory."""
    if size not in MOST_SENT_WHOLE:
        return None
    own = _new_inboxes(size, device)
    torch.cuda.synchronize(device)  # they are empty before anyone sees them
    shared = SharedMemory(own=own, opened=[], addresses={name: [] for name in own})
    problem = ""
    try:
        exported = {name: _exported(inbox) for name, inbox in own.items()}
        store.set(f"inboxes/{rank}", json.dumps(exported))
        _open_all(shared, store, rank, size)
    except CudaIpcError as error:
        problem = f"rank {rank}: {error}"
        store.compare_set(f"inboxes/{rank}", "", "null")  # where it could not export its own
    store.set(f"opened/{rank}", problem or "all")
    told_by = [store.get(f"opened/{other}").decode() for other in range(size)]
    problems = [text for text in told_by if text != "all"]
    if not problems:
        return shared
    if rank == 0:
        _LOG.warning("GPUs do not share memory (%s): NCCL sums small tensors too, which takes longer", problems[0])
    shared.close()
    return None


def _new_inboxes(size: int, device: torch.device) -> dict[str, torch.Tensor]:
    from kimi_kernels.rank_exchange.kernel import new_inbox
    from kimi_kernels.rank_exchange.kernel_parts import new_parts_inbox

    return {
        "sum": new_inbox(torch.int16, size, _most_sent_whole(size), device),
        "parts": new_parts_inbox(size, MOST_SUMMED_BYTES // 2, device),
        "gather": new_inbox(torch.int32, size, _most_gathered(size), device),
    }


def _most_sent_whole(size: int) -> int:
    return MOST_SENT_WHOLE[size] // 2


def _most_gathered(size: int) -> int:
    return MOST_GATHERED_BYTES // size // 4


def _exported(inbox: torch.Tensor) -> tuple[str, int]:
    handle, offset = export_memory(inbox)
    return handle.hex(), offset


def _open_all(shared: SharedMemory, store: Store, rank: int, size: int) -> None:
    """Of all ranks, in their order. Raises CudaIpcError: the driver refuses, or a rank has nothing to open."""
    for other in range(size):
        exported = json.loads(store.get(f"inboxes/{other}"))
        if exported is None:
            raise CudaIpcError(f"rank {other} shares no memory")
        for name, inbox in shared.own.items():
            address = inbox.data_ptr()
            if other != rank:
                handle, offset = exported[name]
                memory = OpenedMemory(bytes.fromhex(handle), offset, inbox.nbytes, inbox.device)
                shared.opened.append(memory)
                address = memory.address
            shared.addresses[name].append(address)


def _with_inboxes(group: dist.ProcessGroup, rank: int, shared: SharedMemory) -> RanksOnGpus:
    # A CPU may do without Triton-language.
    from kimi_kernels.rank_exchange.kernel import Inboxes, RankGather, RankSum
    from kimi_kernels.rank_exchange.kernel_parts import RankSumInParts

    device, size = shared.own["sum"].device, len(shared.addresses["sum"])
    sums = Inboxes(rank, shared.addresses["sum"], torch.int16, _most_sent_whole(size), device)
    parts = RankSumInParts(rank, shared.addresses["parts"], MOST_SUMMED_BYTES // 2, device)
    gathers = Inboxes(rank, shared.addresses["gather"], torch.int32, _most_gathered(size), device)
    return RanksOnGpus(group, EitherSum(RankSum(sums), parts), RankGather(gathers), shared=shared)
