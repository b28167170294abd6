"""The expert and linear kernels are compiled for an H100 and judged by their machine code: no GPU needed."""

from typing import Any

import pytest

from support.compile_record import run_gate

MAX_SHARED_BYTES = 232_448
SPILLED_BYTES = {"down tall mxfp4 128": 64}
"""Kernels that may spill, all of it outside the loop's critical path, and how much."""
MMA_SYNC = (
    "gate_up unsorted",
    "down unsorted",
    "linear 8",
    "gate_up sorted int4 8",
    "gate_up sorted int4 16",
    "gate_up sorted mxfp4 16",
    "gate_up sorted fp8 16",
    "down sorted int4 16",
    "down resident 8",
)
"""Eight columns, or two halves of eight: too few for wgmma to be worth its waits; mma.sync takes them without
padding."""
WGMMA = (
    "gate_up sorted int4 32",
    "gate_up sorted fp8 32",
    "gate_up tall 64",
    "gate_up tall mxfp4 64",
    "down tall mxfp4 128",
    "gate_up persistent int4",
    "down persistent mxfp4",
)


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    return run_gate("support.moe_compile_gate")


def test_nothing_spills_and_shared_memory_fits(compiled: dict[str, dict[str, Any]]) -> None:
    for name, kernel in compiled.items():
        assert kernel["stack_bytes"] <= SPILLED_BYTES.get(name, 0), name
        assert kernel["shared_bytes"] <= MAX_SHARED_BYTES, name


def test_tensor_cores_do_the_products(compiled: dict[str, dict[str, Any]]) -> None:
    for name in MMA_SYNC:
        assert compiled[name]["instructions"].get("HMMA", 0) > 0, name
    for name in WGMMA:
        assert compiled[name]["instructions"].get("HGMMA", 0) > 0, name
        assert "HMMA" not in compiled[name]["instructions"], name


@pytest.mark.parametrize(("name", "num_products"), [("gate_up tall 64", 32), ("down tall mxfp4 128", 64)])
def test_a_tile_at_most_half_full_has_a_body_of_its_own(
    compiled: dict[str, dict[str, Any]], name: str, num_products: int
) -> None:
    assert compiled[name]["instructions"]["HGMMA"] == 2 * num_products


def test_weights_are_copied_asynchronously(compiled: dict[str, dict[str, Any]]) -> None:
    for name in (*MMA_SYNC, *WGMMA):
        assert compiled[name]["instructions"].get("LDGSTS", 0) >= 10, name


def test_products_are_not_serialised(compiled: dict[str, dict[str, Any]]) -> None:
    """ptxas serialises wgmma, an arrive before each, when something else sets the accumulators on any path."""
    for name in WGMMA:
        instructions = compiled[name]["instructions"]
        assert 2 * instructions["WARPGROUP.ARRIVE"] <= instructions["HGMMA"], name


def test_dequantisation_is_packed(compiled: dict[str, dict[str, Any]]) -> None:
    """Two weights an instruction: a 128 x 128 int4 step of four warps widens them in 64 of them."""
    instructions = compiled["gate_up sorted int4 8"]["instructions"]
    assert instructions["HFMA2"] == 64
    # One for both halves of a tile of sixteen, and another body for a tile that fills one half.
    assert compiled["gate_up sorted int4 16"]["instructions"]["HFMA2"] == 128
    # One conversion, of the division that finds the program's tile; none of a weight.
    assert instructions.get("I2F", 0) + instructions.get("I2FP", 0) <= 2


@pytest.mark.parametrize(
    ("mxfp4", "int4"),
    [("gate_up sorted mxfp4 16", "gate_up sorted int4 16"), ("gate_up tall mxfp4 64", "gate_up tall 64")],
)
def test_an_mxfp4_weight_costs_what_an_int4_one_does(
    compiled: dict[str, dict[str, Any]], mxfp4: str, int4: str
) -> None:
    """A product that scales replaces the offset's, and where int4 scales products, those too; codes take more masks."""
    counts = [sum(compiled[name]["instructions"].values()) for name in (mxfp4, int4)]
    assert counts[0] <= 1.05 * counts[1]
    assert compiled[mxfp4]["registers"] <= compiled[int4]["registers"]


def test_blocks_share_a_multiprocessor(compiled: dict[str, dict[str, Any]]) -> None:
    """Four blocks of the kernels for few assignments: their loads in flight are what hides the memory's latency."""
    for name in ("gate_up unsorted", "down unsorted", "linear 8", "gate_up sorted int4 8", "gate_up sorted int4 16"):
        kernel = compiled[name]
        assert kernel["registers"] * 128 * 4 <= 65_536, name
        assert kernel["shared_bytes"] * 4 <= MAX_SHARED_BYTES, name
