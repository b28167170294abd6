"""A checkpoint that is nowhere: any tensor made from (seed, name) when it is read, in slices.

Norm weights are 1, embeddings N(0, 1), every other matrix N(0, 1 / in_features): activations keep their size through
the layers and the router spreads tokens over the experts. `load_format = dummy` serves such weights, made on the GPU.
"""

import hashlib
import math
from dataclasses import dataclass, field

import torch

from kimi_backend.checkpoint.tensor_spec import Specs, TensorRole, TensorSpec
from kimi_backend.errors import CheckpointError

_CHUNK_ELEMENTS = 1 << 22
_BIAS_STD = 0.01
_INT4_CODE_STD = (256 / 12 - 1 / 12) ** 0.5
"""Standard deviation of a uniform code from -8 to 7."""
_MXFP4_CODE_STD = (137 / 16) ** 0.5
"""Standard deviation of a uniform e2m1 code."""
_E8M0_BIAS = 127
_FP8_STD = 64.0
_FP8_MAX = 448.0
_SCALE_SPREAD = 0.25
"""Scales vary by this much around the value that gives the wanted variance, so that a mixed-up scale shows."""


@dataclass(frozen=True, slots=True)
class RandomTensors:
    """A `TensorSource` of random weights. The same (seed, name, dtype, shape) gives the same values on every read,
    whatever the slice; a read makes only the rows that it needs. Biases that a file may lack are left out."""

    specs: Specs
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """The device on which tensors are made, vocabulary maps apart. Another kind of device gives other values."""

    _names: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = (name for name, spec in self.specs.items() if spec.is_required or spec.role is not TensorRole.BIAS)
        object.__setattr__(self, "_names", frozenset(names))

    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._spec(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._spec(name).dtypes[0]

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        spec = self._spec(name)
        stop = spec.shape[dim] if stop is None else stop
        first_row, last_row = (start, stop) if dim == 0 else (0, spec.shape[0])
        rows = self._rows(name, spec, first_row, last_row)
        return rows if dim == 0 else rows.narrow(dim, start, stop - start).contiguous()

    def _spec(self, name: str) -> TensorSpec:
        try:
            return self.specs[name]
        except KeyError:
            raise CheckpointError("random checkpoint", [f"tensor {name!r} is missing"]) from None

    def _rows(self, name: str, spec: TensorSpec, start: int, stop: int) -> torch.Tensor:
        """Rows start:stop, from the chunks of rows that cover them."""
        if spec.role in (TensorRole.DRAFT_TO_TARGET, TensorRole.TARGET_TO_DRAFT):
            return self._vocabulary_map(spec)[start:stop]
        row_elements = max(1, spec.num_elements // spec.shape[0])
        chunk_rows = max(1, _CHUNK_ELEMENTS // row_elements)
        out = torch.empty((stop - start, *spec.shape[1:]), dtype=spec.dtypes[0], device=self.device)
        for chunk in range(start // chunk_rows, -(-stop // chunk_rows)):
            first = chunk * chunk_rows
            last = min(first + chunk_rows, spec.shape[0])
            values = _make(spec, last - first, self._generator(f"{name}#{chunk}", self.device))
            kept = slice(max(start, first), min(stop, last))
            out[kept.start - start : kept.stop - start] = values[kept.start - first : kept.stop - first]
        return out

    def _generator(self, key: str, device: torch.device) -> torch.Generator:
        digest = hashlib.blake2b(f"{self.seed}/{key}".encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") & (2**63 - 1))

    def _vocabulary_map(self, spec: TensorSpec) -> torch.Tensor:
        """Both maps tell of one random set of target ids, drawn from the seed alone."""
        draft_vocab_size = self.specs["d2t"].shape[0]
        vocab_size = self.specs["t2d"].shape[0]
        generator = self._generator("vocabulary", torch.device("cpu"))
        drawn = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size]
        token_ids = drawn.sort().values
        if spec.role is TensorRole.DRAFT_TO_TARGET:
            return (token_ids - torch.arange(draft_vocab_size)).to(spec.dtypes[0])
        return torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, token_ids, True).to(spec.dtypes[0])


def _make(spec: TensorSpec, num_rows: int, generator: torch.Generator) -> torch.Tensor:
    """The next rows of a tensor, on the generator's device."""
    shape = (num_rows, *spec.shape[1:])
    dtype, device = spec.dtypes[0], generator.device
    if spec.role is TensorRole.NORM:
        return torch.ones(shape, dtype=dtype, device=device)
    if spec.role is TensorRole.INT4_SHAPE:
        return torch.tensor(spec.matrix_shape, dtype=dtype)
    if spec.role is TensorRole.INT4_CODES:
        return torch.randint(-(2**31), 2**31, shape, generator=generator, device=device).to(dtype)
    if spec.role is TensorRole.MXFP4_CODES:
        return torch.randint(0, 256, shape, generator=generator, device=device, dtype=dtype)
    if spec.role is TensorRole.MXFP4_SCALES:
        return _mxfp4_scales(spec, shape, generator)
    if spec.role is TensorRole.FP8_VALUES:
        values = torch.randn(shape, generator=generator, device=device) * _FP8_STD
        return values.clamp_(-_FP8_MAX, _FP8_MAX).to(dtype)
    if spec.role in (TensorRole.INT4_SCALES, TensorRole.FP8_SCALES):
        assert spec.matrix_shape is not None, "a scale belongs to a matrix"
        stored_std = _INT4_CODE_STD if spec.role is TensorRole.INT4_SCALES else _FP8_STD
        scale = spec.matrix_shape[1] ** -0.5 / stored_std
        spread = torch.rand(shape, generator=generator, device=device).mul_(2 * _SCALE_SPREAD).add_(1 - _SCALE_SPREAD)
        return spread.mul_(scale).to(dtype)
    return torch.randn(shape, generator=generator, device=device).mul_(_std(spec)).to(dtype)


def _mxfp4_scales(spec: TensorSpec, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """The powers of two on both sides of the wanted scale, each as often as gives the wanted variance."""
    assert spec.matrix_shape is not None, "a scale belongs to a matrix"
    wanted = spec.matrix_shape[1] ** -0.5 / _MXFP4_CODE_STD
    below = math.floor(math.log2(wanted))
    share_above = ((wanted / 2.0**below) ** 2 - 1) / 3
    is_above = torch.rand(shape, generator=generator, device=generator.device) < share_above
    scales: torch.Tensor = is_above + (below + _E8M0_BIAS)
    return scales.to(torch.uint8)


def _std(spec: TensorSpec) -> float:
    if spec.role is TensorRole.EMBEDDING:
        return 1.0
    if spec.role in (TensorRole.ROUTER_BIAS, TensorRole.BIAS):
        return _BIAS_STD
    return float(spec.shape[1] ** -0.5)
