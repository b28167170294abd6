"""The numbers of a board of two processes, as a rank other than 0 waits for them (`serving.step_board`)."""

import torch

from kimi_backend.runners.cuda_ipc import CudaIpcError
from kimi_backend.runners.sealed_memory import MemoryHandle, SealedMemoryError, open_memory
from kimi_backend.runners.stream_memory import StreamMemory


class BoardWords:
    """The memory, mapped and known to the device."""

    def __init__(self, handle: bytes, device: torch.device) -> None:
        """
        Args:
            handle: a `MemoryHandle`, as bytes.

        Raises:
            CudaIpcError: it is not there any more, or the device's streams cannot wait for it.
        """
        try:
            opened = MemoryHandle.from_bytes(handle)
            self._whole = torch.frombuffer(open_memory(opened), dtype=torch.uint8)
        except SealedMemoryError as error:
            raise CudaIpcError(f"the board: {error}") from None
        self._memory = StreamMemory(self._whole.data_ptr(), opened.num_bytes, device)

    def wait(self, offset: int, value: int) -> None:
        """The current stream goes on when the number at this offset has reached a value."""
        self._memory.wait(offset, value)

    def close(self) -> None:
        """Leave it alone, once everything queued is done with it."""
        self._memory.close()
