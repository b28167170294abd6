"""Device memory across processes: the driver's IPC calls, over ctypes.

torch can share tensors too, but its handles count references through files of a process that must outlive the receiver,
and they serve torch's own pickling. A step's hand-over needs less: one buffer, opened once, whose owner lives longer
than its use or takes the use down with it.
"""

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch

from kimi_backend.errors import KimiError

HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1


class CudaIpcError(KimiError):
    """The driver would not share this memory. Names the call and the driver's error."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call_driver(name: str, *args: Any) -> None:
    """One of the driver's functions.

    Raises:
        CudaIpcError: there is no driver, it lacks the function, or it returned an error.
    """
    try:
        driver = _driver()
        function = getattr(driver, name)
    except OSError as error:
        raise CudaIpcError(f"{name}: no CUDA driver here ({error})") from None
    except AttributeError:
        raise CudaIpcError(f"{name}: not in this CUDA driver") from None
    code = function(*args)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(text))
        raise CudaIpcError(f"{name}: {(text.value or b'error').decode()} ({code})")


def enter_context(device: torch.device) -> None:
    """Make the device's context the calling thread's: torch does so when it allocates."""
    torch.empty(1, device=device)


def export_memory(tensor: torch.Tensor) -> tuple[bytes, int]:
    """A handle of the allocation that a tensor lies in, and the tensor's offset in it in bytes.

    The tensor must live as long as another process uses it.

    Raises:
        CudaIpcError: memory that cannot be shared, such as torch's expandable segments.
    """
    with torch.cuda.device(tensor.device):
        enter_context(tensor.device)
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        address = ctypes.c_uint64(tensor.data_ptr())
        call_driver("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        handle = _Handle()
        call_driver("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return bytes(handle.reserved), tensor.data_ptr() - base.value


@dataclass(frozen=True, slots=True)
class _CudaArray:
    """The interface through which torch reads memory that is not its own."""

    address: int
    num_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


class OpenedMemory:
    """Another process's device memory, mapped into this one until `close`."""

    def __init__(self, handle: bytes, offset: int, num_bytes: int, device: torch.device) -> None:
        """Raises CudaIpcError: the owner is gone, or is this very process, or the device does not allow it."""
        self._device = device
        self._base = ctypes.c_uint64()
        self._address, self._num_bytes = 0, num_bytes
        with torch.cuda.device(device):
            enter_context(device)
            call_driver(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(self._base),
                _Handle.from_buffer_copy(handle),
                _LAZY_ENABLE_PEER_ACCESS,
            )
        self._address = self._base.value + offset

    @property
    def address(self) -> int:
        """The address at which this process sees it; `tensor` would copy another GPU's memory."""
        return self._address

    def tensor(self) -> torch.Tensor:
        """[num_bytes] uint8, a view of the memory, which lies on this device; not to be touched after `close`."""
        return torch.as_tensor(_CudaArray(self._address, self._num_bytes), device=self._device)

    def close(self) -> None:
        """Unmap it, once everything launched here is done with it."""
        if not self._base.value:
            return
        with torch.cuda.device(self._device):
            torch.cuda.synchronize(self._device)
            base, self._base = self._base, ctypes.c_uint64()
            call_driver("cuIpcCloseMemHandle", base)
