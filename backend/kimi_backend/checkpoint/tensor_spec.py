"""The tensor that a checkpoint file must hold under one name. `model_specs` lists it for whole models."""

from dataclasses import dataclass
from enum import Enum

import torch

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TensorRole(Enum):
    """The purpose of a tensor, which says what sane values look like."""

    NORM = "norm weight"
    BIAS = "bias"
    LINEAR = "matrix"
    EMBEDDING = "embedding"
    ROUTER_BIAS = "router's correction bias"
    INT4_CODES = "packed int4 codes"
    INT4_SCALES = "int4 group scales"
    INT4_SHAPE = "shape of an int4 matrix"
    FP8_VALUES = "fp8 values"
    FP8_SCALES = "fp8 scales"
    MXFP4_CODES = "packed mxfp4 codes"
    MXFP4_SCALES = "mxfp4 group scales"
    DRAFT_TO_TARGET = "draft-to-target vocabulary offsets"
    TARGET_TO_DRAFT = "mask of target tokens that the draft knows"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The tensor that a file must hold under one name."""

    role: TensorRole
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    """Allowed; the first is what `make-checkpoint` writes."""
    matrix_shape: tuple[int, int] | None = None
    """[out_features, in_features] of the matrix that a quantised tensor is part of."""
    rows_each: int = 0
    """Rows of that matrix that a row of an fp8 scale covers; 0 for a scale that covers all, and for other roles."""
    is_required: bool = True

    def takes(self, shape: tuple[int, ...]) -> bool:
        """False for another shape. Scales of rows are stored as vectors and as columns, one of a matrix in any way."""
        if self.role is TensorRole.FP8_SCALES and len(self.shape) == 1:
            return shape in (self.shape, (*self.shape, 1)) or (self.shape == (1,) and shape == ())
        return shape == self.shape

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtypes[0].itemsize

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


Specs = dict[str, TensorSpec]


def float_dtypes(first: str) -> tuple[torch.dtype, ...]:
    """The float dtypes a tensor may have (it is converted by value), the config's own first."""
    preferred = getattr(torch, first)
    return (preferred, *(dtype for dtype in FLOAT_DTYPES if dtype is not preferred))
