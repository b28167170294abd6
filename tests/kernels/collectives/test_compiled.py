"""Collectives over ranks compiled for an H100 without one."""

import pytest

from kimi_kernels.collectives.receive_buffers import MOST_PROGRAMS
from support import compiled_kernels
from support.compile_record import run_gate

REGISTERS = 65_536
THREADS = 256
PROCESSORS = 132
"""The multiprocessors of an H100."""


@pytest.fixture(scope="module")
def built() -> dict[str, dict[str, int]]:
    if not compiled_kernels.cuobjdump().exists():
        pytest.skip("this build of Triton-language brings no cuobjdump")
    return run_gate("support.compiled_kernels", *compiled_kernels.COLLECTIVES)


@pytest.mark.parametrize("name", compiled_kernels.COLLECTIVES)
def test_accesses_are_16_bytes_wide_and_all_programs_find_room(built: dict[str, dict[str, int]], name: str) -> None:
    found = built[name]
    assert found["stack"] == 0
    at_once = REGISTERS // (THREADS * -(-found["registers"] // 8) * 8) * PROCESSORS
    assert at_once >= MOST_PROGRAMS[int(name.split()[-2])]
    assert found["STG.E.128"] > 0, "elements are written one by one"
    assert found["LDG.E.128.STRONG.SYS"] > 0, "elements are waited for one by one, or from a cache"
