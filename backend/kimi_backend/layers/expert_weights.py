"""Routed experts of one layer, read expert by expert into stacked tensors, in the format the file stores.

| tensor, for every expert e | shape | format |
|---|---|---|
| e.gate_proj.weight, e.up_proj.weight | [I, H] | dense, or fp8 with weight_scale_inv [I / 128, H / 128] |
| e.down_proj.weight | [H, I] | dense, or fp8 with weight_scale_inv [H / 128, I / 128] |
| the same, or .weight_packed | [.., columns / 2] uint8 | mxfp4 with weight_scale [.., columns / 32] uint8 |
| e.gate_proj.weight_packed, e.up_proj.weight_packed | [I, H / 8] int32 | int4 with weight_scale [I, H / 32] |
| e.down_proj.weight_packed | [H, I / 8] int32 | int4 with weight_scale [H, I / 32] |
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from kimi_backend.layers.weight_loader import WeightLoader
from kimi_kernels.weights import MXFP4_GROUP_SIZE, ExpertWeights, Fp8Weight, Int4Weight, Mxfp4Weight

NIBBLES_PER_WORD = 8
CODES_PER_BYTE = 2
_READERS = 4
"""Threads of a rank that read experts."""


@dataclass(frozen=True, slots=True)
class _Field:
    """One tensor of an expert's matrix: its name, how many rows and columns of the matrix an element covers."""

    name: str
    rows_each: int
    columns_each: int
    is_bits: bool = False
    """Bytes whatever the file calls them, as mxfp4's scales."""


def load_experts(loader: WeightLoader, num_experts: int, hidden_size: int, intermediate_size: int) -> ExpertWeights:
    """All experts of a layer, this rank's slice of the intermediate width.

    Args:
        loader: scoped to `...mlp.experts`.
    Raises:
        CheckpointError: a tensor is missing or misshapen, or a slice would cut a quantisation block.
    """
    first = "0.gate_proj"
    mxfp4, scales_name = loader.mxfp4_codes_name(first), loader.scales_name(first)
    if mxfp4 is not None:
        stack = _Stack(loader, num_experts, hidden_size, intermediate_size, MXFP4_GROUP_SIZE)
        codes = _Field(mxfp4.rpartition(".")[2], 1, CODES_PER_BYTE)
        scales = _Field("weight_scale", 1, MXFP4_GROUP_SIZE, is_bits=True)
        return ExpertWeights(
            gate_up=Mxfp4Weight(codes=stack.gate_up(codes), scales=stack.gate_up(scales)),
            down=Mxfp4Weight(codes=stack.down(codes), scales=stack.down(scales)),
        )
    if loader.has(f"{first}.weight_packed"):
        group = loader.int4_group_size
        stack = _Stack(loader, num_experts, hidden_size, intermediate_size, group)
        packed, scales = _Field("weight_packed", 1, NIBBLES_PER_WORD), _Field("weight_scale", 1, group)
        return ExpertWeights(
            gate_up=Int4Weight(packed=stack.gate_up(packed), scales=stack.gate_up(scales), group_size=group),
            down=Int4Weight(packed=stack.down(packed), scales=stack.down(scales), group_size=group),
        )
    if scales_name is not None:
        block = loader.fp8_block_size
        stack = _Stack(loader, num_experts, hidden_size, intermediate_size, block)
        values, scales = _Field("weight", 1, 1), _Field(scales_name.rpartition(".")[2], block, block)
        return ExpertWeights(
            gate_up=Fp8Weight(values=stack.gate_up(values), scales=stack.gate_up(scales), block_size=block),
            down=Fp8Weight(values=stack.down(values), scales=stack.down(scales), block_size=block),
        )
    stack = _Stack(loader, num_experts, hidden_size, intermediate_size, 1)
    dense = _Field("weight", 1, 1)
    return ExpertWeights(
        gate_up=stack.gate_up(dense).to(loader.dtype),
        down=stack.down(dense).to(loader.dtype),
    )


class _Stack:
    """Fills [experts, rows, columns] tensors on the device, a few experts' slices at a time."""

    def __init__(
        self, loader: WeightLoader, num_experts: int, hidden: int, intermediate: int, multiple_of: int
    ) -> None:
        self._loader = loader
        self._num_experts = num_experts
        self._hidden = hidden
        self._intermediate = intermediate
        name = f"{loader.prefix}*.moe_intermediate_size"
        self._start, self._stop = loader.bounds(name, intermediate, multiple_of)

    def gate_up(self, field: _Field) -> torch.Tensor:
        """Gate rows above up rows: this rank's slice of rows."""
        shape = (-(-self._intermediate // field.rows_each), -(-self._hidden // field.columns_each))
        start, stop = self._start // field.rows_each, -(-self._stop // field.rows_each)
        rows = stop - start
        stacked = self._empty("0.gate_proj", field, (2 * rows, shape[1]))

        def fill(expert: int) -> None:
            for half, projection in enumerate(("gate_proj", "up_proj")):
                part = self._read(f"{expert}.{projection}", field, shape, 0, start, stop)
                stacked[expert, half * rows : (half + 1) * rows] = part

        self._for_each_expert(fill)
        return stacked

    def down(self, field: _Field) -> torch.Tensor:
        """This rank's slice of columns."""
        shape = (-(-self._hidden // field.rows_each), -(-self._intermediate // field.columns_each))
        start, stop = self._start // field.columns_each, -(-self._stop // field.columns_each)
        stacked = self._empty("0.down_proj", field, (shape[0], stop - start))

        def fill(expert: int) -> None:
            stacked[expert] = self._read(f"{expert}.down_proj", field, shape, 1, start, stop)

        self._for_each_expert(fill)
        return stacked

    def _for_each_expert(self, fill: Callable[[int], None]) -> None:
        """Several experts at once, in the order of their numbers: a disk serves several readers faster than one."""
        in_inference_mode = torch.is_inference_mode_enabled()  # each thread has its own

        def run(expert: int) -> None:
            with torch.inference_mode(in_inference_mode):
                fill(expert)

        with ThreadPoolExecutor(_READERS) as pool:
            for _ in pool.map(run, range(self._num_experts)):
                pass

    def _empty(self, matrix: str, field: _Field, shape: tuple[int, int]) -> torch.Tensor:
        stored = self._loader.source.dtype(f"{self._loader.prefix}{matrix}.{field.name}")
        # Scales that are powers of two (ue8m0) are exact in float32, which the fp8 kernels read.
        dtype = torch.uint8 if field.is_bits else torch.float32 if stored is torch.float8_e8m0fnu else stored
        return torch.empty((self._num_experts, *shape), dtype=dtype, device=self._loader.device)

    def _read(
        self, matrix: str, field: _Field, shape: tuple[int, int], dim: int, start: int, stop: int
    ) -> torch.Tensor:
        name = f"{matrix}.{field.name}"
        self._loader.check_shape(name, shape)
        part = self._loader.source.read(self._loader.prefix + name, dim, start, stop)
        return part.view(torch.uint8) if field.is_bits else part
