"""The aux buffers of a target's ranks, each on a GPU of its own, opened by the draft's ranks on the same GPUs.

Every rank has all aux hidden states, so the draft's rank r reads the buffer of the target's rank r. All open theirs or
none does: they run the same steps.
"""

from contextlib import suppress

import torch

from kimi_backend.runners.aux_buffer import AuxBuffer
from kimi_backend.runners.aux_ipc import OpenedAuxBuffer, export_aux_buffer, join_handles, split_handles
from kimi_backend.runners.cuda_ipc import CudaIpcError
from kimi_backend.runners.ranks.messages import EXPORT_AUX, OPEN_AUX, WorkerError
from kimi_backend.runners.ranks.workers import Workers


def export_on_ranks(buffer: AuxBuffer, workers: Workers) -> bytes:
    """The handle of rank 0's buffer and those of its workers.

    Raises:
        CudaIpcError: the memory of one of them cannot be shared.
    """
    own = export_aux_buffer(buffer)
    try:
        return join_handles([own, *workers.ask(EXPORT_AUX, [b""] * workers.count)])
    except WorkerError as error:
        raise CudaIpcError(str(error)) from None


class OpenedOnRanks:
    """A target's buffers, opened by all ranks of a draft. Used as `OpenedAuxBuffer`."""

    def __init__(self, exported: bytes, device: torch.device, workers: Workers) -> None:
        """
        Args:
            exported: of `export_on_ranks`.
            device: of the draft's rank 0.
            workers: its other ranks.

        Raises:
            CudaIpcError: one of them cannot open its own; then none is open.
            InvalidRequestError: the bytes are no handle.
        """
        handles = split_handles(exported)
        if len(handles) != workers.count + 1:
            raise CudaIpcError(f"the target has {len(handles)} ranks, the draft {workers.count + 1}")
        self._workers = workers
        self._own = OpenedAuxBuffer(handles[0], device)
        try:
            workers.ask(OPEN_AUX, handles[1:])
        except WorkerError as error:
            self.close()
            raise CudaIpcError(str(error)) from None
        self.exported = exported
        self.buffer = self._own.buffer

    def close(self) -> None:
        """Unmap all of them. Ranks that have ended have."""
        with suppress(WorkerError):
            self._workers.ask(OPEN_AUX, [b""] * self._workers.count)
        self._own.close()
