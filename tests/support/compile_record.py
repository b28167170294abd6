"""Keeps what was found in kernels: one whose source, constants and compiler are as they were when it was recorded is
not compiled again, which takes two seconds each. A kernel that has changed is compiled by the test that asks.

    PYTHONPATH=tests:kernels:backend python -m support.compile_record     # records all; `make generated` runs it
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[1] / "kernels/compiled.json"
"""The hash of what is compiled, and how -> what was found."""
PROGRAMS = ("support.compiled_kernels", "support.moe_compile_gate", "support.sampling_compile_gate")
"""Each compiles the kernels of a gate; given `--record`, it prints what this file is to hold of them."""

_recorded: dict[str, dict[str, Any]] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
_asked: dict[str, dict[str, Any]] = {}


def find_in_compiled(
    source: Any, target: Any, options: dict[str, Any], look: Callable[[Any], dict[str, Any]], what: object
) -> dict[str, Any]:
    """Return what `look` finds in the compiled kernel, or found when the same was recorded.

    Args:
        source: an ASTSource. what: tells which things `look` looks for.
    """
    import triton

    of_all = (triton.__version__, source.hash(), target, sorted(options.items()), what)
    key = hashlib.sha256(repr(of_all).encode()).hexdigest()
    if key not in _recorded:
        _recorded[key] = look(triton.compile(source, target=target, options=options))
    _asked[key] = _recorded[key]
    return _asked[key]


def answer(results: dict[str, Any]) -> None:
    """Print, as a gate's program, its results; or the entries that they were made of."""
    sys.stdout.write(json.dumps(_asked if "--record" in sys.argv else results))


def run_gate(program: str, *words: str) -> dict[str, dict[str, Any]]:
    """Return what a gate's program says, in a process without Triton-language's interpreter."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-m", program, *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return results


def main() -> None:
    entries: dict[str, Any] = {}
    for program in PROGRAMS:
        entries |= run_gate(program, "--record")
    lines = (f"{json.dumps(key)}: {json.dumps(entries[key], sort_keys=True)}" for key in sorted(entries))
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
