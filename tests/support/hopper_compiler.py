"""Compile a kernel for an H100 on a machine without one, and read what the compiler made of it."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from support.compile_record import find_in_compiled

HOPPER = GPUTarget("cuda", 90, 32)
MAX_SHARED_BYTES = 232_448
"""Most shared memory a thread block may have on Hopper."""
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    registers: int
    stack_bytes: int
    """Registers spilled to memory, by their space."""
    shared_bytes: int
    instructions: dict[str, int]
    """The number of each SASS instruction, by its name up to the first dot."""


def compile_for_hopper(
    function: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    divisible: set[str],
    num_warps: int,
    **options: Any,
) -> CompiledKernel:
    """Compile with these argument types.

    Args:
        types: Triton's type of each argument by name, i32 if absent.
        divisible: integer arguments that are multiples of 16; pointers always are.
        options: more of the compiler's, by name.
    """
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name in divisible
    }
    source = GluonASTSource if function.is_gluon() else ASTSource
    whole = source(
        fn=function,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    found = find_in_compiled(whole, HOPPER, {"num_warps": num_warps} | options, _look, "all instructions")
    return CompiledKernel(**found)


def _look(compiled: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _dump("-res-usage", file.name)
        sass = _dump("-sass", file.name)
    opcodes = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)(\.ARRIVE)?", sass, re.MULTILINE)
    return {
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "stack_bytes": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "shared_bytes": compiled.metadata.shared,
        "instructions": dict(Counter(name + suffix for name, suffix in opcodes)),
    }


def _dump(what: str, path: str) -> str:
    return subprocess.run([TOOL, what, path], capture_output=True, text=True, check=True).stdout
