"""The aux buffer across processes: the target exports it once, the draft opens it once.

Nothing else needs to be ordered: a target's reply leaves after its host has waited for the step, aux hidden states
included, and the next step is sent after the draft's reply, which has waited likewise.
"""

import dataclasses
import json

import torch

from kimi_backend.errors import InvalidRequestError
from kimi_backend.runners.aux_buffer import AuxBuffer
from kimi_backend.runners.cuda_ipc import CudaIpcError, OpenedMemory, export_memory
from kimi_backend.runners.device_name import device_name

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AuxBufferHandle:
    """The handle by which another process opens a buffer; travels as bytes in `RunnerDescription.aux_buffer`."""

    memory: str
    """The driver's handle, in hexadecimal."""
    offset: int
    """Bytes from the start of the shared allocation."""
    shape: tuple[int, int, int]
    """(num_regions, rows, width)"""
    dtype: str
    device: str
    """UUID of the GPU that it lies on."""

    def to_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> "AuxBufferHandle":
        """Raises InvalidRequestError: not a handle of this version."""
        try:
            handle = cls(**json.loads(text))
            regions, rows, width = handle.shape
            return dataclasses.replace(handle, shape=(int(regions), int(rows), int(width)))
        except (ValueError, TypeError) as error:
            raise InvalidRequestError(f"aux buffer's handle: {len(text)} bytes that are none: {error}") from None


def export_aux_buffer(buffer: AuxBuffer) -> bytes:
    """The handle of a buffer on a GPU, for another process. The buffer must outlive its use there.

    Raises:
        CudaIpcError: its memory cannot be shared.
    """
    memory, offset = export_memory(buffer.tensor)
    torch.cuda.synchronize(buffer.tensor.device)
    handle = AuxBufferHandle(
        memory=memory.hex(),
        offset=offset,
        shape=(buffer.num_regions, buffer.rows, buffer.width),
        dtype=str(buffer.tensor.dtype).removeprefix("torch."),
        device=device_name(buffer.tensor.device),
    )
    return handle.to_bytes()


class OpenedAuxBuffer:
    """A target's buffer in the draft's process."""

    def __init__(self, exported: bytes, device: torch.device) -> None:
        """Open what `export_aux_buffer` gave.

        Raises:
            CudaIpcError: it lies on another GPU, or the driver would not map it.
            InvalidRequestError: the bytes are no handle.
        """
        handle = AuxBufferHandle.from_bytes(exported)
        if handle.device != device_name(device):
            raise CudaIpcError(f"the target's buffer is on {handle.device}, the draft on {device_name(device)}")
        if handle.dtype not in _DTYPES:
            raise InvalidRequestError(f"aux buffer's dtype: {handle.dtype} given, {', '.join(_DTYPES)} are allowed")
        dtype = _DTYPES[handle.dtype]
        regions, rows, width = handle.shape
        num_bytes = regions * rows * width * dtype.itemsize
        self._memory = OpenedMemory(bytes.fromhex(handle.memory), handle.offset, num_bytes, device)
        self.exported = exported
        self.buffer = AuxBuffer(self._memory.tensor().view(dtype).view(handle.shape))

    def close(self) -> None:
        """Unmap it; the buffer is not to be touched afterwards."""
        self._memory.close()


def join_handles(handles: list[bytes]) -> bytes:
    """Join the handles of all ranks' buffers, in the order of the ranks, of a target on several GPUs."""
    return handles[0] if len(handles) == 1 else json.dumps([handle.decode() for handle in handles]).encode()


def split_handles(joined: bytes) -> list[bytes]:
    """Split what `join_handles` joined.

    Raises:
        InvalidRequestError: not handles of this version.
    """
    try:
        handles = json.loads(joined)
        return [handle.encode() for handle in handles] if isinstance(handles, list) else [joined]
    except (ValueError, AttributeError) as error:
        raise InvalidRequestError(f"aux buffer's handle: {len(joined)} bytes that are none: {error}") from None
