"""Order between streams of two processes, through host memory that both have mapped: a stream waits for a number to
be reached, or writes one. A stream that waits takes no multiprocessor, and any CPU that has the memory can let it go.
"""

import ctypes
import threading

import torch

from kimi_backend.runners.cuda_ipc import CudaIpcError, call_driver, enter_context

_CAN_USE_64_BIT_STREAM_MEM_OPS = 122
_HOST_REGISTER_SUPPORTED = 99
_PORTABLE_AND_MAPPED = 3
_AT_LEAST = 0
"""The condition of a wait: until the number in memory is not less, as signed 64-bit integers."""


def _require(attribute: int, name: str) -> None:
    """Require an ability of the device whose context this thread is in."""
    number, value = ctypes.c_int(), ctypes.c_int()
    call_driver("cuCtxGetDevice", ctypes.byref(number))
    call_driver("cuDeviceGetAttribute", ctypes.byref(value), attribute, number)
    if not value.value:
        raise CudaIpcError(f"the device has no {name}")


class StreamMemory:
    """Pages of this process that the device reads and writes too, until `close`."""

    def __init__(self, address: int, num_bytes: int, device: torch.device) -> None:
        """
        Args:
            address: start of a page. num_bytes: whole pages.

        Raises:
            CudaIpcError: the driver or the device cannot do it.
        """
        self._device = device
        self._host = ctypes.c_void_p(address)
        self._base = ctypes.c_uint64()
        self._entered = 0
        with torch.cuda.device(device):
            self._enter()
            _require(_HOST_REGISTER_SUPPORTED, "registered host memory")
            _require(_CAN_USE_64_BIT_STREAM_MEM_OPS, "64-bit operations on memory in streams")
            call_driver("cuMemHostRegister_v2", self._host, ctypes.c_size_t(num_bytes), _PORTABLE_AND_MAPPED)
            call_driver("cuMemHostGetDevicePointer_v2", ctypes.byref(self._base), self._host, 0)

    def wait(self, offset: int, value: int) -> None:
        """Queue: go on when the int64 at an offset in bytes is at least `value`."""
        self._queue("cuStreamWaitValue64_v2", offset, value, _AT_LEAST)

    def write(self, offset: int, value: int) -> None:
        """Queue: write an int64. Who sees it sees what the stream has done before."""
        self._queue("cuStreamWriteValue64_v2", offset, value, 0)

    def close(self) -> None:
        """Give the pages back, once everything queued is done with them."""
        base, self._base = self._base, ctypes.c_uint64()
        if base.value:
            with torch.cuda.device(self._device):
                torch.cuda.synchronize(self._device)
                call_driver("cuMemHostUnregister", self._host)

    def _queue(self, name: str, offset: int, value: int, flags: int) -> None:
        self._enter()
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        address = ctypes.c_uint64(self._base.value + offset)
        call_driver(name, stream, address, ctypes.c_uint64(value), ctypes.c_uint(flags))

    def _enter(self) -> None:
        """The driver's functions need the calling thread to be in the device's context."""
        if self._entered != threading.get_ident():
            enter_context(self._device)
            self._entered = threading.get_ident()
