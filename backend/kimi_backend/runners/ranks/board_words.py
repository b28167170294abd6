"""The numbers of a board of two processes, as a rank other than 0 waits for them (`serving.step_board`)."""

import json
import mmap
import os
import sys

import torch

from kimi_backend.runners.cuda_ipc import CudaIpcError
from kimi_backend.runners.stream_memory import StreamMemory

_WORD_BYTES = 8


def board_handle(process_id: int, descriptor: int, num_bytes: int, number: int) -> bytes:
    """By which a process of this user opens the memory that another one has as a file.

    Args:
        number: the board's own, its first word: a descriptor may be another file's by the time it is opened.
    """
    fields = {"process_id": process_id, "descriptor": descriptor, "num_bytes": num_bytes, "number": number}
    return json.dumps(fields).encode()


class BoardWords:
    """The memory, mapped and known to the device."""

    def __init__(self, handle: bytes, device: torch.device) -> None:
        """Raises CudaIpcError: it is not there any more, or the device's streams cannot wait for it."""
        try:
            fields = json.loads(handle)
            num_bytes = int(fields["num_bytes"])
            descriptor = os.open(f"/proc/{int(fields['process_id'])}/fd/{int(fields['descriptor'])}", os.O_RDWR)
            try:
                memory = mmap.mmap(descriptor, num_bytes)
            finally:
                os.close(descriptor)
            if int.from_bytes(memory[:_WORD_BYTES], sys.byteorder) != int(fields["number"]):
                raise ValueError("its process has it no more")
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CudaIpcError(f"the board: {error}") from None
        self._whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._memory = StreamMemory(self._whole.data_ptr(), num_bytes, device)

    def wait(self, offset: int, value: int) -> None:
        """The current stream goes on when the number at this offset has reached a value."""
        self._memory.wait(offset, value)

    def close(self) -> None:
        """Leave it alone, once everything queued is done with it."""
        self._memory.close()
