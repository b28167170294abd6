"""Kernels compiled for an H100 without one: no spills beyond a list, tensor cores used, shared memory within bounds."""

import pytest

from support import compiled_kernels
from support.compile_record import run_gate

SHARED_LIMIT = 232_448
"""Bytes a thread block of an H100 may ask for."""
STACK_BYTES = {
    # A few addresses that the loop needs once a tile.
    "mla hopper 32 bf16": 48,
    "mla hopper 64 bf16": 16,
    "mla hopper 64 row keys": 16,
    # What a segment takes besides half a result and a tile's scores; hardly any of it in the loop.
    "mla pairs": 144,
    "mla pairs row keys": 144,
    "mla hopper 16 float8": 16,
    "mla hopper 32 float8": 120,
    "mla hopper 64 float8": 40,
    # The way for block sizes below 64 keeps an address a row.
    "mla any 32": 64,
    "mla any 64": 160,
    # Two words of what the chunk before left, once a program.
    "prefill hopper goes on": 8,
}
"""Spilled bytes a thread that are known; every other kernel spills nothing."""


@pytest.fixture(scope="module")
def built() -> dict[str, dict[str, int]]:
    if not compiled_kernels.cuobjdump().exists():
        pytest.skip("this build of Triton-language brings no cuobjdump")
    return run_gate("support.compiled_kernels")


@pytest.mark.parametrize("name", compiled_kernels.BUILDS)
def test_resources(built: dict[str, dict[str, int]], name: str) -> None:
    found = built[name]
    assert found["shared"] <= SHARED_LIMIT
    assert found["stack"] <= STACK_BYTES.get(name, 0)
    assert found["HGMMA"] > 0, "no warpgroup product: the kernel would run at half the rate or less"
    assert found["HMMA"] == 0
    assert found["UTMALDG"] + found["LDGSTS"] > 0, "tiles are loaded through registers"
    # ptxas serialises products, an arrive before each, when something else sets their accumulators on any path.
    assert 2 * found["WARPGROUP.ARRIVE"] <= found["HGMMA"]
