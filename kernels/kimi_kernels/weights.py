"""Weights as the checkpoint stores them, before a kernel set repacks them for its own use."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

INT4_GROUP_SIZE = 32
FP8_BLOCK_SIZE = 128
MXFP4_GROUP_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Weight:
    """Symmetric int4 in groups along the input: `weight = (nibble - 8) * scale` (compressed-tensors, pack-quantized).

    Nibble j of a packed word, counted from its least significant end, is input column `8 * word + j`.
    """

    packed: torch.Tensor
    """[..., out_features, in_features / 8] int32."""
    scales: torch.Tensor
    """[..., out_features, in_features / group_size] bf16 or wider."""
    group_size: int = INT4_GROUP_SIZE

    @property
    def shape(self) -> torch.Size:
        """[..., out_features, in_features]."""
        return torch.Size((*self.packed.shape[:-1], 8 * self.packed.shape[-1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """float8_e4m3fn in square blocks: `weight = value * scale of its block`; border blocks may be partial."""

    values: torch.Tensor
    """[..., out_features, in_features] float8_e4m3fn."""
    scales: torch.Tensor
    """[..., ceil(out_features / block), ceil(in_features / block)] float32 (`weight_scale_inv` in the file)."""
    block_size: int = FP8_BLOCK_SIZE

    @property
    def shape(self) -> torch.Size:
        """[..., out_features, in_features]."""
        return self.values.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Weight:
    """OCP's MXFP4: `weight = e2m1 code * 2 ** (scale - 127)`, a scale for each group of 32 columns.

    The low nibble of a byte is the even one of its two columns. A code's top bit is its sign; the others stand for
    0, 0.5, 1, 1.5, 2, 3, 4 and 6.
    """

    codes: torch.Tensor
    """[..., out_features, in_features / 2] uint8."""
    scales: torch.Tensor
    """[..., out_features, in_features / 32] uint8, the bits of e8m0."""

    @property
    def shape(self) -> torch.Size:
        """[..., out_features, in_features]."""
        return torch.Size((*self.codes.shape[:-1], 2 * self.codes.shape[-1]))


LinearWeight = torch.Tensor | Int4Weight | Fp8Weight
"""Types that a linear layer may be kept in."""
Weight = LinearWeight | Mxfp4Weight
"""Types that routed experts may be kept in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The routed experts of one layer, stacked; gate rows above up rows.

    E experts held here, H hidden, I intermediate (this rank's slice).
    """

    gate_up: Weight
    """[E, 2 * I, H]."""
    down: Weight
    """[E, H, I]."""


def expert_weight(stacked: Weight, expert: int) -> Weight:
    """A view of one expert's matrix, [out_features, in_features], in the format of the stacked ones."""
    if isinstance(stacked, torch.Tensor):
        return stacked[expert]
    held = {field.name: getattr(stacked, field.name) for field in fields(stacked)}
    parts: dict[str, Any] = {name: part[expert] for name, part in held.items() if isinstance(part, torch.Tensor)}
    return replace(stacked, **parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight in the layout that one kernel set wants. Opaque: only the set that packed it reads it."""

    kind: str
    tensors: tuple[torch.Tensor, ...]
    out_features: int
    in_features: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExperts:
    """A layer's routed experts in the layout that one kernel set wants. Opaque likewise."""

    kind: str
    tensors: tuple[torch.Tensor, ...]
    num_experts: int
    hidden_size: int
    intermediate_size: int
