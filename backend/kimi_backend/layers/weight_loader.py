"""Checkpoint tensors -> this rank's weights, in the compute dtype, whatever format the file stores them in."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from kimi_backend.checkpoint.tensor_source import TensorSource
from kimi_backend.errors import CheckpointError
from kimi_backend.parallel import TensorParallelGroup
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.quantization.mxfp4 import dequantize_mxfp4
from kimi_kernels.weights import FP8_BLOCK_SIZE, INT4_GROUP_SIZE, MXFP4_GROUP_SIZE, Mxfp4Weight

_SCALES = ("weight_scale_inv", "weight_scale")
_VALUES = ("weight_packed", "weight")


class Shard(Enum):
    """The part of a [out_features, in_features] matrix that a rank holds."""

    NONE = "all of it"
    ROWS = "a slice of out_features"
    COLUMNS = "a slice of in_features"


@dataclass(frozen=True, slots=True)
class WeightLoader:
    """Reads weights for one rank. A linear layer stored in fp8 or mxfp4 is dequantised here; only routed experts stay
    quantised (`layers.expert_weights`)."""

    source: TensorSource
    kernels: KernelSet
    group: TensorParallelGroup
    device: torch.device
    dtype: torch.dtype
    prefix: str = ""
    fp8_block_size: int = FP8_BLOCK_SIZE
    int4_group_size: int = INT4_GROUP_SIZE

    def scoped(self, name: str) -> "WeightLoader":
        """A loader for the names below `name`."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def has(self, name: str) -> bool:
        return self.prefix + name in self.source.names()

    def vector(self, name: str, size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[size], on every rank."""
        self._check_shape(self.prefix + name, (size,))
        return self.source.read(self.prefix + name).to(self.device, dtype or self.dtype)

    def optional_vector(self, name: str, size: int) -> torch.Tensor | None:
        """The same as `vector`; None where the file has no such tensor."""
        return self.vector(name, size) if self.has(name) else None

    def bias(self, name: str, size: int, shard: Shard = Shard.NONE) -> torch.Tensor | None:
        """This rank's part of linear layer `name`'s bias [out_features]; None where the file has none.

        Args:
            shard: of the matrix. Ranks that hold slices of in_features sum their results, so that one of them adds
                the bias.
        """
        full_name = f"{self.prefix}{name}.bias"
        if not self.has(f"{name}.bias") or (shard is Shard.COLUMNS and self.group.rank):
            return None
        self._check_shape(full_name, (size,))
        start, stop = self.bounds(full_name, size) if shard is Shard.ROWS else (0, size)
        return self.source.read(full_name, 0, start, stop).to(self.device, self.dtype)

    def matrix(
        self, name: str, shape: tuple[int, int], shard: Shard = Shard.NONE, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """This rank's part of linear layer `name`: `name.weight`, with its scales if fp8; or mxfp4's two tensors.

        Args:
            shape: [out_features, in_features] of the whole matrix.
        Raises:
            CheckpointError: a tensor is missing or its shape differs, or the ranks cannot divide it.
        """
        full_name = self.prefix + name
        dim = 1 if shard is Shard.COLUMNS else 0
        start, stop = (0, shape[0]) if shard is Shard.NONE else self.bounds(full_name, shape[dim])
        scales = self.scales_name(name)
        if scales is None:
            self._check_shape(f"{full_name}.weight", shape)
            weight = self.source.read(f"{full_name}.weight", dim, start, stop)
        elif (codes := self.mxfp4_codes_name(name)) is not None:
            weight = self._read_mxfp4(self.prefix + codes, self.prefix + scales, shape, dim, start, stop)
        else:
            weight = self._read_fp8(full_name, self.prefix + scales, shape, dim, start, stop)
        return weight.to(self.device, dtype or self.dtype)

    def scales_name(self, name: str) -> str | None:
        """Tensor of linear layer `name`'s scales; None where it is not quantised."""
        return next((f"{name}.{suffix}" for suffix in _SCALES if self.has(f"{name}.{suffix}")), None)

    def mxfp4_codes_name(self, name: str) -> str | None:
        """Tensor of linear layer `name`'s mxfp4 codes: compressed-tensors' name or quark's; None in another format."""
        found = (f"{name}.{suffix}" for suffix in _VALUES if self.has(f"{name}.{suffix}"))
        return next((codes for codes in found if self.source.dtype(self.prefix + codes) is torch.uint8), None)

    def stacked(self, parts: Sequence[tuple[str, tuple[int, int], Shard]]) -> torch.Tensor:
        """Matrices that read the same input, one above the other: [sum of out_features, in_features]."""
        return torch.cat([self.matrix(name, shape, shard) for name, shape, shard in parts])

    def stacked_bias(self, parts: Sequence[tuple[str, tuple[int, int], Shard]]) -> torch.Tensor | None:
        """The biases of `stacked`, 0 where a part has none; None where none has one."""
        biases = [self.bias(name, shape[0], shard) for name, shape, shard in parts]
        if all(bias is None for bias in biases):
            return None
        sizes = [shape[0] // self.group.size if shard is Shard.ROWS else shape[0] for _, shape, shard in parts]
        zeros = [torch.zeros(size, dtype=self.dtype, device=self.device) for size in sizes]
        return torch.cat([zero if bias is None else bias for bias, zero in zip(biases, zeros, strict=True)])

    def bounds(self, name: str, size: int, multiple_of: int = 1) -> tuple[int, int]:
        """This rank's `start, stop` of a dimension that the ranks divide evenly.

        Raises:
            CheckpointError: it does not divide into parts that are multiples of `multiple_of`.
        """
        part, rest = divmod(size, self.group.size)
        if rest or part % multiple_of:
            raise CheckpointError(
                "tensor parallelism",
                [
                    f"{name}: {size} elements do not divide among {self.group.size} ranks"
                    f" in parts that are multiples of {multiple_of}"
                ],
            )
        return self.group.rank * part, (self.group.rank + 1) * part

    def check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        """Raises CheckpointError unless tensor `name` is there with this shape."""
        self._check_shape(self.prefix + name, expected)

    def _check_shape(self, full_name: str, expected: tuple[int, ...]) -> None:
        found = self.source.shape(full_name)
        if tuple(found) != expected:
            raise CheckpointError(full_name, [f"expected shape {list(expected)}, found {list(found)}"])

    def _read_mxfp4(
        self, codes: str, scales: str, shape: tuple[int, int], dim: int, start: int, stop: int
    ) -> torch.Tensor:
        group = MXFP4_GROUP_SIZE
        self._check_shape(codes, (shape[0], shape[1] // 2))
        self._check_shape(scales, (shape[0], shape[1] // group))
        # A slice of columns may start inside a group: all of the group is read.
        first, last = (start // group, -(-stop // group)) if dim else (start, stop)
        pairs = group // 2 if dim else 1
        weight = Mxfp4Weight(
            codes=self.source.read(codes, dim, first * pairs, last * pairs).to(self.device),
            scales=self.source.read(scales, dim, first, last).view(torch.uint8).to(self.device),
        )
        plain = dequantize_mxfp4(weight)
        return plain.narrow(1, start - first * group, stop - start) if dim else plain

    def _read_fp8(
        self, name: str, scales_name: str, shape: tuple[int, int], dim: int, start: int, stop: int
    ) -> torch.Tensor:
        self._check_shape(f"{name}.weight", shape)
        values = self.source.read(f"{name}.weight", dim, start, stop)
        stored = self.source.shape(scales_name)
        if math.prod(stored) == 1:
            return values.float() * self.source.read(scales_name).float().reshape(1)
        if stored in ((shape[0],), (shape[0], 1)):
            rows = self.source.read(scales_name, 0, *((start, stop) if dim == 0 else (0, shape[0])))
            return values.float() * rows.float().reshape(-1, 1)
        block = self.fp8_block_size
        num_blocks = [-(-size // block) for size in shape]
        self._check_shape(scales_name, (num_blocks[0], num_blocks[1]))
        first_block = start // block
        scales = self.source.read(scales_name, dim, first_block, -(-stop // block))
        # A slice may start inside a block: look each element's block up by its place in the whole matrix.
        block_of = torch.arange(start, stop, device=scales.device) // block - first_block
        scales = scales.float().index_select(dim, block_of)
        other = torch.arange(shape[1 - dim], device=scales.device) // block
        return values.float() * scales.index_select(1 - dim, other)
