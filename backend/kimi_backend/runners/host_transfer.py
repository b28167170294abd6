"""A step plan's arrays on the device, in one copy.

A step has some thirty small arrays; thirty copies of a few bytes would cost more than the attention of a small batch.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 8
"""Bytes; the widest dtype of a plan."""


def to_device(arrays: Mapping[str, npt.NDArray[np.generic]], device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors of the same names, shapes, dtypes and values, all parts of one buffer.

    On a GPU the copy is asynchronous, from pinned memory that torch keeps until it is done.
    """
    sizes = [array.nbytes for array in arrays.values()]
    starts = np.cumsum([0] + [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes])
    host = torch.empty(int(starts[-1]), dtype=torch.uint8, pin_memory=device.type == "cuda")
    view = host.numpy()
    for array, start, size in zip(arrays.values(), starts, sizes, strict=False):
        view[start : start + size] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    buffer = host.to(device, non_blocking=True)
    tensors = {}
    for (name, array), start, size in zip(arrays.items(), starts, sizes, strict=False):
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        tensors[name] = buffer[int(start) : int(start) + size].view(dtype).view(array.shape)
    return tensors
