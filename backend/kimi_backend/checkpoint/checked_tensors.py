"""Checks the values of scales, norms and biases while a model reads them: one bad value spoils a whole matrix."""

import math
from dataclasses import dataclass

import torch

from kimi_backend.checkpoint.tensor_source import SourceWrapper, TensorSource
from kimi_backend.checkpoint.tensor_spec import Specs, TensorRole, TensorSpec
from kimi_backend.errors import CheckpointError

_SCALES = (TensorRole.INT4_SCALES, TensorRole.FP8_SCALES)
_FINITE = (*_SCALES, TensorRole.ROUTER_BIAS, TensorRole.NORM, TensorRole.BIAS)
VALUE_CHECKED_ROLES = (*_FINITE, TensorRole.INT4_SHAPE, TensorRole.MXFP4_SCALES)
_E8M0_BIAS, _E8M0_NAN = 127, 255
_MXFP4_LARGEST_SCALE = _E8M0_BIAS + 1
"""2, of weights up to 12: the expert kernels keep scales 2^126 too large."""


def value_problems(name: str, spec: TensorSpec, values: torch.Tensor) -> list[str]:
    """List what is wrong with (a slice of) a tensor's values; nothing for roles whose values may be anything."""
    if spec.role is TensorRole.INT4_SHAPE:
        expected = list(spec.matrix_shape or ())
        found = values.tolist()
        return [] if found == expected else [f"{name}: expected the values {expected}, found {found}"]
    if spec.role is TensorRole.MXFP4_SCALES:
        return _mxfp4_scale_problems(name, values.view(torch.uint8))
    if spec.role not in _FINITE:
        return []
    if values.dtype.itemsize == 1:
        values = values.float()  # float8 has no comparisons
    # One pass over what may be gigabytes: a NaN anywhere makes both ends NaN.
    low, high = (float(end) for end in values.aminmax()) if values.numel() else (0.0, 0.0)
    if not (math.isfinite(low) and math.isfinite(high)):
        num_bad = int((~torch.isfinite(values)).sum())
        return [f"{name}: expected finite values, found {num_bad} NaN or infinite"]
    if spec.role in _SCALES and low < 0:
        return [f"{name}: expected scales of at least 0, found {low:g}"]
    return []


def _mxfp4_scale_problems(name: str, scales: torch.Tensor) -> list[str]:
    largest = int(scales.max()) if scales.numel() else 0
    if largest == _E8M0_NAN:
        return [f"{name}: expected finite values, found {int((scales == _E8M0_NAN).sum())} NaN"]
    if largest > _MXFP4_LARGEST_SCALE:
        return [f"{name}: expected scales of at most 2, found 2 ** {largest - _E8M0_BIAS}"]
    return []


def check_values(specs: Specs, source: TensorSource) -> list[str]:
    """One line for each tensor of checked values that holds bad ones. Reads all of them."""
    problems = []
    for name in sorted(source.names() & specs.keys()):
        if specs[name].role in VALUE_CHECKED_ROLES:
            problems += value_problems(name, specs[name], source.read(name))
    return problems


@dataclass(frozen=True, slots=True)
class CheckedTensors(SourceWrapper):
    """A source that refuses bad values when they are read."""

    source: TensorSource
    specs: Specs
    subject: str
    """The name of the checkpoint in errors, such as its path."""

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        tensor = self.source.read(name, dim, start, stop)
        spec = self.specs.get(name)
        problems = value_problems(name, spec, tensor) if spec is not None else []
        if problems:
            raise CheckpointError(self.subject, problems)
        return tensor
