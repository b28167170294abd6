"""Checks of op arguments: a wrong one raises ValueError that names it, what came and what was expected."""

from typing import NoReturn, Protocol

import torch
from torch import Tensor

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


class Shaped(Protocol):
    """A tensor, or a quantised weight."""

    @property
    def shape(self) -> torch.Size: ...


def require_shape(name: str, tensor: Shaped, *expected: int | None) -> None:
    """Raise unless `tensor` has the expected shape; None stands for any size."""
    shape = tensor.shape
    if len(shape) == len(expected):
        for want, size in zip(expected, shape):  # noqa: B905 # of one length; every op of a step comes here
            if want is not None and want != size:
                break
        else:
            return
    wanted = ", ".join("any" if want is None else str(want) for want in expected)
    raise ValueError(f"{name}: got shape {list(shape)}, expected [{wanted}]")


def require_float(name: str, tensor: Tensor) -> None:
    """Raise unless `tensor` holds floating-point numbers of 16 bits or more."""
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{name}: got {tensor.dtype}, expected float32, bfloat16, float16 or float64")


def require_dtype(name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    """Raise unless `tensor` has one of the allowed dtypes."""
    if tensor.dtype not in allowed:
        wanted = " or ".join(str(dtype) for dtype in allowed)
        raise ValueError(f"{name}: got {tensor.dtype}, expected {wanted}")


def require_columns(name: str, tensor: Tensor) -> None:
    """Raise unless the last dimension is contiguous."""
    if not tensor.is_contiguous() and tensor.stride(-1) != 1:
        refuse(name, f"column stride {tensor.stride(-1)}", "1")


def refuse(name: str, got: object, expected: str) -> NoReturn:
    """Raise: where a step's checks would else put words together that nobody reads."""
    raise ValueError(f"{name}: got {got}, expected {expected}")


def require(condition: bool, name: str, got: object, expected: str) -> None:
    """Raise unless `condition` holds."""
    if not condition:
        refuse(name, got, expected)
