"""The two ends of the shared aux buffer, in the runners' processes: who exports it, who opens it.

Whatever stands in the way is logged and answered with None, and the aux hidden states travel as tensors; only with
`aux_transfer=ipc` is it an error.
"""

import logging
from functools import partial
from typing import Any

import torch

from kimi_backend.errors import ConfigError, InvalidRequestError
from kimi_backend.runners.aux_buffer import AuxBuffer
from kimi_backend.runners.cuda_ipc import CudaIpcError
from kimi_backend.runners.ranks.aux_on_ranks import OpenedOnRanks, export_on_ranks
from kimi_backend.runners.ranks.workers import NO_WORKERS, Workers
from kimi_backend.types.plan import AuxHandle

logger = logging.getLogger("kimi_backend.serving")

AUTO, IPC, TENSOR = "auto", "ipc", "tensor"


def offer_aux_buffer(buffer: AuxBuffer | None, aux_transfer: str, workers: Workers = NO_WORKERS) -> bytes | None:
    """The target's end: the handle for `RunnerDescription.aux_buffer`; None when nothing is shared.

    Args:
        workers: the target's other ranks, whose buffers are offered with it.

    Raises:
        ConfigError: `aux_transfer` is ipc and the buffer cannot be shared.
    """
    if aux_transfer == TENSOR or buffer is None:
        return None
    try:
        if not buffer.tensor.is_cuda:
            raise CudaIpcError("the target runs on a CPU")
        return export_on_ranks(buffer, workers)
    except CudaIpcError as error:
        if aux_transfer == IPC:
            raise ConfigError(f"setting aux_transfer: ipc given, but {error}; auto is allowed") from None
        if buffer.tensor.is_cuda:
            logger.warning("the aux buffer is not shared: %s", error)
        return None


class AuxReceiver:
    """The draft's end: keeps the target's buffer open."""

    def __init__(
        self, device: torch.device, aux_transfer: str, open_buffer: Any = None, workers: Workers = NO_WORKERS
    ) -> None:
        """
        Args:
            device: the draft's.
            open_buffer: makes what is used as an `OpenedOnRanks`, of a handle and a device.
            workers: the draft's other ranks.

        Raises:
            ConfigError: `aux_transfer` is ipc on a CPU.
        """
        if aux_transfer == IPC and device.type != "cuda":
            raise ConfigError("setting aux_transfer: ipc given, but the runners are on a CPU; auto is allowed")
        self._device = device
        self._aux_transfer = aux_transfer
        self._open_buffer = open_buffer or partial(OpenedOnRanks, workers=workers)
        self._opened: OpenedOnRanks | None = None

    def open(self, handle: bytes | None) -> bytes | None:
        """Open the target's buffer, in place of the one before. Returns the handle that is open now, or None.

        Raises:
            ConfigError: `aux_transfer` is ipc and it cannot be opened.
        """
        if handle is not None and self._opened is not None and self._opened.exported == handle:
            return handle
        self.close()
        try:
            if handle is None or self._aux_transfer == TENSOR:
                raise CudaIpcError("the target offers no buffer")
            if self._device.type != "cuda":
                raise CudaIpcError("the draft runs on a CPU")
            self._opened = self._open_buffer(handle, self._device)
        except CudaIpcError as error:
            if self._aux_transfer == IPC:
                raise ConfigError(f"setting aux_transfer: ipc given, but {error}; auto is allowed") from None
            if handle is not None and self._aux_transfer == AUTO:
                logger.warning("the target's aux buffer is not opened: %s", error)
            return None
        return handle

    @property
    def num_regions(self) -> int:
        """The regions of the open buffer; 0 where none is."""
        return 0 if self._opened is None else self._opened.buffer.num_regions

    def resolve(self, aux: AuxHandle, num_rows: int) -> torch.Tensor:
        """[num_rows, width], the first rows of the region that a plan names; fewer where it has fewer.

        Raises:
            InvalidRequestError: no buffer is open, or it has no such region.
        """
        if self._opened is None:
            raise InvalidRequestError(f"plan aux.region: {aux.region} given, but no buffer of the target's is open")
        return self._opened.buffer.resolve(aux)[:num_rows]

    def close(self) -> None:
        """Unmap what is open."""
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened.close()
