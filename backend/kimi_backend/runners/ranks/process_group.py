"""Processes of a tensor-parallel group join, and part.

They meet at a TCP store that rank 0 opens, on the address that it is given and no other.
"""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kimi_backend.errors import ConfigError, KimiError
from kimi_backend.parallel import DistributedRanks, SingleRank, TensorParallelGroup
from kimi_backend.runners.receive_buffers import RanksOnGpus, with_receive_buffers

_LOOPBACK_HOSTS = ("127.0.0.1", "localhost")


class RankError(KimiError):
    """The ranks of a tensor-parallel group did not find one another."""


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
    return with_receive_buffers(dist.group.WORLD, store, device) if is_gpu else DistributedRanks(dist.group.WORLD)


def leave(group: TensorParallelGroup) -> None:
    """Part from the other ranks, which leave as well. Graphs that hold the group's collectives must be gone before.

    A process whose fellow ranks are gone should end instead: parting may wait for them.
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
