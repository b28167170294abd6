"""Launches of the expert kernels: one function a kernel, each with the scratch it needs."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kimi_kernels.dependent_launch import pdl_options
from kimi_kernels.hopper import is_hopper
from kimi_kernels.kernel_interpreter import num_processors
from kimi_kernels.moe_experts.kernel_align import count_kernel, place_kernel
from kimi_kernels.moe_experts.kernel_down import down_sorted_kernel
from kimi_kernels.moe_experts.kernel_gate_up import gate_up_sorted_kernel, gate_up_unsorted_kernel
from kimi_kernels.moe_experts.kernel_persistent import MULTIPLYING_WARPS, multiply_persistent_kernel
from kimi_kernels.moe_experts.kernel_tall import down_tall_kernel, gate_up_tall_kernel
from kimi_kernels.moe_experts.launch import (
    MAX_CHUNK,
    RESIDENT_STEPS,
    FewLaunch,
    HopperShapes,
    SortedLaunch,
    max_tiles,
    may_start_early,
)
from kimi_kernels.moe_experts.op import ExpertOutputs
from kimi_kernels.quantization.tiles import TILE_ROWS, step_columns
from kimi_kernels.weights import PackedExperts

PACKED_KINDS = {f"triton.{kind}": kind for kind in ("int4", "mxfp4", "fp8", "float")}
FEW_COLUMNS = 8
TALL_STAGES = 4
TALL_WARPS = 8
PERSISTENT_STAGES = 3


class Layer:
    """One call's arguments and what every launch derives from them."""

    def __init__(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: PackedExperts, first_expert: int
    ) -> None:
        self.x = x if x.stride(1) == 1 else x.contiguous()
        self.topk_ids = topk_ids.contiguous()
        self.topk_weights = topk_weights.contiguous()
        self.first_expert = first_expert
        self.num_experts = experts.num_experts
        self.hidden_size = experts.hidden_size
        self.intermediate_size = experts.intermediate_size
        self.num_tokens, self.top_k = topk_ids.shape
        self.num_assignments = topk_ids.numel()
        self.gate_up, self.gate_up_scales, self.down, self.down_scales, self.arrivals = experts.tensors
        self.gate_up_row_tiles, self.gate_up_steps = self.gate_up.shape[1:3]
        self.down_row_tiles, self.down_steps = self.down.shape[1:3]
        kind = PACKED_KINDS[experts.kind]
        step = step_columns(kind)
        # The bit tricks make bf16; other types, and the CPU, take plain arithmetic.
        is_portable = x.dtype != torch.bfloat16 or x.device.type != "cuda"
        self.gate_up_flags = {
            "KIND": kind,
            "WORDS": self.gate_up.shape[-1],
            "EVEN": self.hidden_size % step == 0,
            "PORTABLE": is_portable,
        }
        self.down_flags = self.gate_up_flags | {"EVEN": self.intermediate_size % step == 0}
        self.persistent_flags = {"KIND": kind, "STAGES": PERSISTENT_STAGES, "num_warps": MULTIPLYING_WARPS.value}
        self.tall_flags = {"KIND": kind, "STAGES": TALL_STAGES, "WARPS": TALL_WARPS, "num_warps": TALL_WARPS}
        self.gate_up_sizes = self.intermediate_size, self.gate_up_row_tiles, self.gate_up_steps
        self.down_sizes = self.intermediate_size, self.hidden_size, self.down_row_tiles, self.down_steps
        # They wait for the kernel before, which lets them start as it ends and no sooner: programs that wait for long
        # crowd onto the multiprocessors that are free first.
        self.early = pdl_options(x.device) if may_start_early(self.down_steps) else {"PDL": False}

    def hopper_shapes(self) -> HopperShapes:
        """The products with weights of four bits, bf16 arithmetic and whole steps; tall ones have groups of these and
        of rows."""
        if self.gate_up_flags["KIND"] not in ("int4", "mxfp4") or self.gate_up_flags["PORTABLE"]:
            return HopperShapes()
        has_groups = [
            bool(flags["EVEN"]) and tiles.shape[1] % 2 == 0 and tiles.shape[2] % TALL_STAGES == 0
            for tiles, flags in ((self.gate_up, self.gate_up_flags), (self.down, self.down_flags))
        ]
        is_even = bool(self.gate_up_flags["EVEN"] and self.down_flags["EVEN"])
        # Its products of mxfp4 have been compiled, not yet run.
        is_persistent = is_even and self.gate_up_flags["KIND"] == "int4" and is_hopper(self.x.device)
        return HopperShapes(gate_up_tall=has_groups[0], down_tall=has_groups[1], persistent=is_persistent)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.x.dtype, device=self.x.device)


def gate_up_few(layer: Layer, launch: FewLaunch) -> Tensor:
    """[assignments, intermediate_size] activations of unsorted assignments."""
    hidden = layer.empty(layer.num_assignments, layer.intermediate_size)
    num_programs = layer.num_assignments * layer.gate_up_row_tiles * launch.splits
    partials = layer.empty(num_programs * TILE_ROWS if launch.splits > 1 else 0, dtype=torch.float32)
    gate_up_unsorted_kernel[(num_programs,)](
        layer.x, layer.gate_up, layer.gate_up_scales, hidden, partials, layer.arrivals, layer.topk_ids,
        layer.x.stride(0), layer.top_k, layer.first_expert, layer.num_experts, layer.hidden_size, *layer.gate_up_sizes,
        COLUMNS=FEW_COLUMNS, STAGES=launch.gate_up_stages, SPLITS=launch.splits, **layer.gate_up_flags, **layer.early,
    )  # fmt: skip
    return hidden


def down_few(layer: Layer, launch: FewLaunch, hidden: Tensor) -> Tensor:
    """[assignments, hidden_size] products of unsorted assignments; rows of experts held elsewhere are not written."""
    products = layer.empty(layer.num_assignments, layer.hidden_size)
    resident_steps = layer.down_steps if layer.down_steps <= RESIDENT_STEPS else 0
    tiles_a_group = launch.down_tiles_a_group if resident_steps else 1
    constants = {"COLUMNS": FEW_COLUMNS, "STAGES": launch.down_stages, "SCALE_WEIGHTS": False}
    _down(layer, None, tiles_a_group, resident_steps, hidden, products, constants)
    return products


@dataclass(frozen=True, slots=True)
class Order:
    """Assignments sorted by expert, as `place_kernel` writes them."""

    entries: Tensor
    assignments: Tensor
    num_tiles: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.entries, self.assignments, self.num_tiles


def sort_assignments(layer: Layer, columns: int) -> Order:
    """Tiles of `columns` assignments of one expert each."""
    bins = max(16, triton.next_power_of_2(layer.num_experts))
    chunk = min(MAX_CHUNK, max(32, triton.next_power_of_2(layer.num_assignments)))
    num_chunks = triton.cdiv(layer.num_assignments, chunk)
    limit = max_tiles(layer.num_assignments, layer.num_experts, columns)
    counts = layer.empty(num_chunks if num_chunks > 1 else 0, bins, dtype=torch.int32)
    entries, assignments, num_tiles = (layer.empty(size, dtype=torch.int32) for size in (limit, limit * columns, 1))
    sizes = (layer.num_assignments, layer.first_expert, layer.num_experts)
    shape = {"CHUNK": chunk, "BINS": bins, "num_warps": 4, **layer.early}
    if num_chunks > 1:
        count_kernel[(num_chunks,)](layer.topk_ids, counts, *sizes, **shape)
    order = Order(entries, assignments, num_tiles)
    place_kernel[(num_chunks,)](
        layer.topk_ids, counts, *order.tensors, *sizes, num_chunks, COLUMNS=columns, SINGLE=num_chunks == 1, **shape
    )
    return order


def gate_up_sorted(layer: Layer, launch: SortedLaunch, order: Order) -> Tensor:
    """[assignments, intermediate_size] activations; rows of experts held elsewhere are not written."""
    hidden = layer.empty(layer.num_assignments, layer.intermediate_size)
    tensors = (layer.x, layer.gate_up, layer.gate_up_scales, hidden, *order.tensors, layer.x.stride(0), layer.top_k)
    if launch.is_persistent:
        multiply_persistent_kernel[(_num_persistent(layer, order, layer.gate_up_row_tiles),)](
            *tensors, *layer.gate_up_sizes, ACTIVATE=True, **layer.persistent_flags
        )
    elif launch.gate_up_tall_rows:
        num_groups = layer.gate_up_row_tiles * TILE_ROWS // launch.gate_up_tall_rows
        gate_up_tall_kernel[(order.entries.numel() * num_groups,)](
            *tensors, *layer.gate_up_sizes, COLUMNS=launch.columns, ROWS=launch.gate_up_tall_rows, **layer.tall_flags
        )
    else:
        gate_up_sorted_kernel[(order.entries.numel() * layer.gate_up_row_tiles,)](
            *tensors, layer.hidden_size, *layer.gate_up_sizes, **launch.constants, **layer.gate_up_flags, **layer.early
        )
    return hidden


def down_sorted(layer: Layer, launch: SortedLaunch, order: Order, hidden: Tensor) -> Tensor:
    """[assignments, hidden_size] products; rows of experts held elsewhere are not written."""
    products = layer.empty(layer.num_assignments, layer.hidden_size)
    if launch.is_persistent:
        multiply_persistent_kernel[(_num_persistent(layer, order, layer.down_row_tiles),)](
            hidden, layer.down, layer.down_scales, products, *order.tensors, hidden.stride(0), 1,
            *layer.down_sizes[1:], ACTIVATE=False, **layer.persistent_flags,
        )  # fmt: skip
    elif launch.down_tall_rows:
        num_groups = layer.down_row_tiles * TILE_ROWS // launch.down_tall_rows
        down_tall_kernel[(order.entries.numel() * num_groups,)](
            hidden, layer.down, layer.down_scales, products, *order.tensors, *layer.down_sizes,
            COLUMNS=launch.columns, ROWS=launch.down_tall_rows, **layer.tall_flags,
        )  # fmt: skip
    else:
        resident_steps = layer.down_steps if launch.resident else 0
        _down(layer, order, launch.tiles_a_group, resident_steps, hidden, products, launch.constants)
    return products


def _num_persistent(layer: Layer, order: Order, num_row_tiles: int) -> int:
    """The programs of a persistent kernel: one a multiprocessor, which holds no second one, or fewer."""
    return min(num_processors(layer.x.device), order.entries.numel() * num_row_tiles)


def _down(
    layer: Layer,
    order: Order | None,
    tiles_a_group: int,
    resident_steps: int,
    hidden: Tensor,
    products: Tensor,
    constants: dict[str, int],
) -> None:
    """order: of the tiles; None where each is an assignment."""
    num_groups = triton.cdiv(layer.down_row_tiles, tiles_a_group)
    ids = layer.topk_ids
    num_tiles = layer.num_assignments if order is None else order.entries.numel()
    down_sorted_kernel[(num_tiles * num_groups,)](
        hidden, layer.down, layer.down_scales, products, *((ids, ids, ids) if order is None else order.tensors), ids,
        layer.first_expert, layer.num_experts, *layer.down_sizes, num_groups, tiles_a_group, SORTED=order is not None,
        RESIDENT_STEPS=resident_steps, **constants, **layer.down_flags, **layer.early,
    )  # fmt: skip


def expert_outputs(layer: Layer, outputs: Tensor) -> ExpertOutputs:
    """The layer's result, which is not summed yet."""
    return ExpertOutputs(
        outputs=outputs,
        topk_ids=layer.topk_ids,
        topk_weights=layer.topk_weights,
        first_expert=layer.first_expert,
        num_experts=layer.num_experts,
    )
