"""The row-invariant kernel set: its facts, and that it needs no Triton-language."""

import dataclasses
import subprocess
import sys

from kimi_kernels import KernelSet


def test_it_is_row_invariant_and_absorbs_everything() -> None:
    kernels = KernelSet.plain()
    assert kernels.name == "plain"
    assert kernels.row_invariant
    assert kernels.absorb_prefill
    for field in dataclasses.fields(kernels):
        if field.name not in ("name", "row_invariant", "absorb_prefill"):
            assert callable(getattr(kernels, field.name)), field.name


def test_it_loads_where_triton_language_is_not_installed() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "from kimi_kernels import KernelSet\n"
        "KernelSet.plain()\n"
        "assert not [name for name in sys.modules if name.startswith('triton.')]\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
