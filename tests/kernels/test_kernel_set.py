"""The row-invariant kernel sets: their facts, and that they need no Triton-language."""

import dataclasses
import subprocess
import sys

import pytest

from kimi_kernels import KernelSet


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_set_is_row_invariant_and_absorbs_everything(name: str) -> None:
    kernels: KernelSet = getattr(KernelSet, name)()
    assert kernels.name == name
    assert kernels.row_invariant
    assert kernels.absorb_prefill
    for field in dataclasses.fields(kernels):
        if field.name not in ("name", "row_invariant", "absorb_prefill"):
            assert callable(getattr(kernels, field.name)), field.name


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_set_loads_where_triton_language_is_not_installed(name: str) -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "from kimi_kernels import KernelSet\n"
        f"KernelSet.{name}()\n"
        "assert not [name for name in sys.modules if name.startswith('triton.')]\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
