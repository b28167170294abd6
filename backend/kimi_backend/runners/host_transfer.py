"""A step's small arrays to the device, and its results back, in one copy each way.

A plan has some thirty arrays; thirty copies of a few bytes would cost more than the attention of a small batch.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 16
"""Bytes. Kernels are compiled anew for a pointer of another alignment, up to this one."""

Arrays = Mapping[str, npt.NDArray[Any]]

TORCH_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}
_NUMPY_DTYPES = {torch_dtype: numpy_dtype for numpy_dtype, torch_dtype in TORCH_DTYPES.items()}


def to_device(arrays: Arrays, device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors of the same names, shapes, dtypes and values.

    On a GPU all are parts of one buffer, and the copy is asynchronous, from pinned memory that torch keeps until it is
    done. On a CPU a tensor is the array itself wherever it may be written to.

    Raises:
        KeyError: a dtype that no plan has.
    """
    if device.type == "cpu":
        return {name: _as_tensor(array) for name, array in arrays.items()}
    dtypes = [TORCH_DTYPES[array.dtype] for array in arrays.values()]
    sizes = [array.nbytes for array in arrays.values()]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    view = host.numpy()
    for array, start, size in zip(arrays.values(), starts, sizes, strict=False):
        view[start : start + size].view(array.dtype).reshape(array.shape)[...] = array
    buffer = host.to(device, non_blocking=True)
    return {
        name: buffer[start : start + size].view(dtype).view(array.shape)
        for (name, array), dtype, start, size in zip(arrays.items(), dtypes, starts, sizes, strict=False)
    }


def _as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    if array.dtype not in TORCH_DTYPES:
        raise KeyError(array.dtype)
    flags = array.flags
    return torch.from_numpy(array if flags.writeable and flags.c_contiguous else array.copy())


def to_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, npt.NDArray[Any]]:
    """Arrays of the same names, shapes and values; waits for the device once."""
    if all(tensor.device.type == "cpu" for tensor in tensors.values()):
        return {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}
    # Widest first, so that every part starts at a multiple of its own item size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in ordered]
    buffer = torch.cat(parts).cpu().numpy()
    arrays, start = {}, 0
    for (name, tensor), part in zip(ordered, parts, strict=True):
        stop = start + part.numel()
        arrays[name] = buffer[start:stop].view(_NUMPY_DTYPES[tensor.dtype]).reshape(tensor.shape)
        start = stop
    return arrays
