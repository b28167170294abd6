"""Numbers as tensors: beside a tensor a plain number is made one at every call, which takes longer than the operation
itself on the few rows of a decode step."""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=256)
def constant(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of no dimensions; not to be written to."""
    return torch.tensor(value, dtype=dtype)
