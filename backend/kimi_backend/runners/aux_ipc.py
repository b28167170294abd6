"""The aux buffer across processes: the target exports it once, the draft opens it once.

On a GPU the driver shares it; on a CPU it lies in memory that both map (`runners.sealed_memory`). Nothing else needs to
be ordered: a target's reply leaves after its host has waited for the step, aux hidden states included, and the next
step is sent after the draft's reply, which has waited likewise; without such waits, the shared semaphores order them.
"""

import dataclasses
import json
import math

import torch

from kimi_backend.errors import InvalidRequestError
from kimi_backend.runners.aux_buffer import AuxBuffer
from kimi_backend.runners.cuda_ipc import CudaIpcError, OpenedMemory, export_memory
from kimi_backend.runners.device_name import device_name
from kimi_backend.runners.sealed_memory import MemoryHandle, OwnMemory, SealedMemoryError, open_memory

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
_CPU_OFFSET = 64
"""Bytes of a CPU's shared memory before the buffer: its token, up to the next cache line."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AuxBufferHandle:
    """The handle by which another process opens a buffer; travels as bytes in `RunnerDescription.aux_buffer`."""

    memory: str
    """The handle of the memory, the driver's or a `MemoryHandle`, in hexadecimal."""
    offset: int
    """Bytes from the start of the shared allocation."""
    shape: tuple[int, int, int]
    """(num_regions, rows, width)"""
    dtype: str
    device: str
    """UUID of the GPU that it lies on, or cpu."""

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


def allocate_on_cpu(num_regions: int, rows: int, width: int, dtype: torch.dtype) -> AuxBuffer:
    """A zeroed buffer in a CPU's memory, which another process can open. Pages that no step writes take none.

    Raises:
        SealedMemoryError: no memory to share.
    """
    shape = num_regions, rows, width
    memory = OwnMemory(_CPU_OFFSET + math.prod(shape) * dtype.itemsize)
    tensor = torch.frombuffer(memory.memory, dtype=dtype, offset=_CPU_OFFSET)
    return AuxBuffer(tensor.view(shape), memory)


def export_aux_buffer(buffer: AuxBuffer) -> bytes:
    """The handle of a buffer, for another process. The buffer must outlive its use there.

    Raises:
        CudaIpcError: its memory cannot be shared.
    """
    memory, offset = _export(buffer)
    handle = AuxBufferHandle(
        memory=memory.hex(),
        offset=offset,
        shape=(buffer.num_regions, buffer.rows, buffer.width),
        dtype=str(buffer.tensor.dtype).removeprefix("torch."),
        device=device_name(buffer.tensor.device),
    )
    return handle.to_bytes()


def _export(buffer: AuxBuffer) -> tuple[bytes, int]:
    """(the memory's handle, bytes before the buffer)."""
    if buffer.memory is not None:
        return buffer.memory.handle.to_bytes(), _CPU_OFFSET
    if not buffer.tensor.is_cuda:
        raise CudaIpcError("the target's buffer lies in memory of its own process")
    exported = export_memory(buffer.tensor)
    torch.cuda.synchronize(buffer.tensor.device)
    return exported


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
        self._memory: OpenedMemory | None = None
        memory = bytes.fromhex(handle.memory)
        if device.type == "cpu":
            tensor = _open_on_cpu(memory, handle, dtype)
        else:
            num_bytes = math.prod(handle.shape) * dtype.itemsize
            self._memory = OpenedMemory(memory, handle.offset, num_bytes, device)
            tensor = self._memory.tensor().view(dtype)
        self.exported = exported
        self.buffer = AuxBuffer(tensor.view(handle.shape))

    def close(self) -> None:
        """Unmap it; the buffer is not to be touched afterwards. On a CPU it goes with the last tensor over it."""
        if self._memory is not None:
            self._memory.close()


def _open_on_cpu(memory: bytes, handle: AuxBufferHandle, dtype: torch.dtype) -> torch.Tensor:
    """[numbers] of the mapped memory."""
    try:
        mapped = open_memory(MemoryHandle.from_bytes(memory))
        return torch.frombuffer(mapped, dtype=dtype, count=math.prod(handle.shape), offset=handle.offset)
    except (SealedMemoryError, ValueError) as error:
        raise CudaIpcError(f"the target's buffer cannot be opened: {error}") from None


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
