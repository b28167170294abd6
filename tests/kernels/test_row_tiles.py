"""Products on tiles, which a GPU takes and a CPU for odd widths: with higher tiles, as on a GPU, the same results, and
the same bits beside other rows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kimi_kernels import KernelSet, row_tiles
from kimi_kernels.moe_experts import plain as plain_experts
from kimi_kernels.weights import ExpertWeights
from support.bit_equality import assert_same_bits, normals

KERNELS = KernelSet.plain()
ROWS, WIDTH = 150, 31
TOLERANCE = 1e-5

X, HEADS, CHOICES = normals(ROWS, WIDTH), normals(ROWS, 4, WIDTH), normals(ROWS, 6).argsort(-1)[:, :2].to(torch.int32)
WEIGHT, W_UK = KERNELS.pack_linear(normals(48, WIDTH)), normals(4, WIDTH, 32)
EXPERTS = KERNELS.pack_experts(ExpertWeights(gate_up=normals(6, 64, WIDTH) / 6, down=normals(6, WIDTH, 32) / 6))
CALLS: dict[str, Callable[[int], Tensor]] = {
    "linear": lambda count: KERNELS.linear(X[:count], WEIGHT),
    "per_head_linear": lambda count: KERNELS.per_head_linear(HEADS[:count], W_UK),
    "moe_experts": lambda count: KERNELS.moe_experts(X[:count], CHOICES[:count], torch.ones(count, 2), EXPERTS),
}


@pytest.mark.parametrize("name", CALLS)
def test_higher_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALLS[name]
    expected = call(ROWS)
    monkeypatch.setitem(row_tiles.TILE_ROWS, "cpu", 64)
    monkeypatch.setitem(plain_experts.TILE_ROWS, "cpu", 32)
    got = call(ROWS)
    torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE)
    for count in (1, 63, 65, 130):
        assert_same_bits(call(count), got[:count], f"{count} rows")


def test_what_lies_in_whole_tiles_is_copied_to_change_its_type_only() -> None:
    """A weight of a large model is held once, and rows that fit are not copied at every product."""
    ready = torch.zeros(32, 48)
    assert row_tiles.tile_weight(ready) is ready
    assert row_tiles.tile_rows(ready, 48, 16) is ready
    for tiles in (row_tiles.tile_weight(ready.half()), row_tiles.tile_rows(ready.half(), 48, 16)):
        assert tiles.dtype == torch.float32 and tiles.shape == ready.shape
