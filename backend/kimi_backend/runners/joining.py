"""How the processes of a tensor-parallel group find one another, and part.

They meet at a TCP store that rank 0 opens, on the address that it is given and no other. On GPUs they also open one
another's inboxes, for `kimi_kernels.rank_sum`; where the driver does not share them, NCCL sums everything.
"""

import logging
import socket
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from kimi_backend.errors import ConfigError, KimiError
from kimi_backend.parallel import DistributedRanks, SingleRank, TensorParallelGroup
from kimi_backend.runners.cuda_ipc import HANDLE_BYTES, CudaIpcError, OpenedMemory, export_memory

_LOG = logging.getLogger(__name__)
MOST_SUM_BYTES: Final = {2: 4 << 20, 4: 1 << 20, 8: 512 << 10}
"""Of one rank's rows, by the number of ranks: beyond, NCCL is as fast or faster (docs/performance.md). A rank sends its
rows to every other one, so the limit falls as there are more."""
_BYTES_PER_ELEMENT = 2


class RankError(KimiError):
    """The ranks of a tensor-parallel group did not find one another."""


class SharedInboxes:
    """A sum over ranks, and the inboxes that it is made in."""

    def __init__(self, rank: int, inbox: torch.Tensor, opened: dict[int, OpenedMemory], most_elements: int) -> None:
        """opened: the other ranks' inboxes, by rank."""
        from kimi_kernels.rank_sum.kernel import RankSum  # a CPU may do without Triton-language

        self._inbox = inbox
        self._opened = opened
        addresses = [inbox.data_ptr() if other == rank else opened[other].address for other in range(len(opened) + 1)]
        self._sum = RankSum(rank, addresses, most_elements, inbox.device)

    def takes(self, x: torch.Tensor) -> bool:
        """See `FastSum`."""
        return self._sum.takes(x)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `FastSum`."""
        return self._sum(x)

    def close(self) -> None:
        """Unmap the other ranks' memory, once no kernel uses it any more."""
        for memory in self._opened.values():
            memory.close()


def join_ranks(
    rank: int,
    size: int,
    address: str,
    device: torch.device,
    *,
    join_timeout_s: float = 60.0,
    collective_timeout_s: float = 600.0,
) -> TensorParallelGroup:
    """Meet the other ranks; returns when all are there. Once a process at a time.

    On a GPU this makes `device` the process's current one, and the group's communicator, which a capture could not.

    Args:
        address: "HOST:PORT" of this host that rank 0 opens.
        device: "cpu" takes gloo, "cuda:INDEX" NCCL.
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
    store = _meet(rank, size, address, join_timeout_s)
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
    return DistributedRanks(dist.group.WORLD, _share_inboxes(store, rank, size, device) if is_gpu else None)


def leave(group: TensorParallelGroup) -> None:
    """Part from the other ranks, which leave as well. Graphs that hold the group's collectives must be gone before.

    A process whose peers are gone should end instead: parting may wait for them.
    """
    if not isinstance(group, DistributedRanks) or not dist.is_initialized():
        return
    if isinstance(group.fast_sum, SharedInboxes):
        dist.barrier(group.group)  # nobody writes into memory that is being unmapped
        group.fast_sum.close()
    dist.destroy_process_group()


def _meet(rank: int, size: int, address: str, timeout_s: float) -> TCPStore:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not host:
        raise ConfigError(f"address of the ranks: {address!r} given; HOST:PORT is allowed")
    timeout = timedelta(seconds=timeout_s)
    try:
        # torch would listen on every interface.
        listening = socket.create_server((host, int(port))).detach() if rank == 0 else None
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


def _share_inboxes(store: Store, rank: int, size: int, device: torch.device) -> SharedInboxes | None:
    """None, on every rank alike, where one of them cannot open another's memory."""
    from kimi_kernels.rank_sum.kernel import new_inbox

    most_bytes = MOST_SUM_BYTES.get(size)
    if most_bytes is None:
        return None
    most_elements = most_bytes // _BYTES_PER_ELEMENT
    inbox = new_inbox(size, most_elements, device)
    torch.cuda.synchronize(device)  # it is empty before anyone sees it
    opened: dict[int, OpenedMemory] = {}
    problem = ""
    try:
        handle, offset = export_memory(inbox)
        store.set(f"inbox/{rank}", f"{handle.hex()} {offset}")
        for other in set(range(size)) - {rank}:
            shared, start = store.get(f"inbox/{other}").decode().split()
            opened[other] = OpenedMemory(bytes.fromhex(shared), int(start), inbox.nbytes, device)
    except CudaIpcError as error:
        problem = f"rank {rank}: {error}"
        store.set(f"inbox/{rank}", f"{bytes(HANDLE_BYTES).hex()} 0")
    store.set(f"opened/{rank}", problem or "all")
    told_by = [store.get(f"opened/{other}").decode() for other in range(size)]
    problems = [text for text in told_by if text != "all"]
    if not problems:
        return SharedInboxes(rank, inbox, opened, most_elements)
    if rank == 0:
        _LOG.warning("GPUs do not share memory (%s): NCCL sums small tensors too, which takes longer", problems[0])
    for memory in opened.values():
        memory.close()
    return None
