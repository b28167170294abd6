"""Small ops on the token table, in which a target and its draft hand tokens to each other without the host.

The table has a row for every running sequence and one more, the last, that padding writes. It has two halves, int32:

    drawn [rows, 1 + W]      written by the target: accepted draft tokens of its last verify, then the tokens it drew
    proposed [rows, 2 + k]   written by the draft: stamp of its last step, that step's status, then its proposals
"""

import importlib
from typing import cast

from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.token_table.op import TokenTableOps

STAMP, STATUS, PROPOSALS = 0, 1, 2
"""Columns of the draft's half; proposals stand from the last one on."""
STAMP_MASK = 2**31 - 1


def token_table_ops(kernels: KernelSet) -> TokenTableOps:
    """The module of the ops that matches the set: on a CPU nothing may need Triton-language."""
    module = "kernel" if kernels.name == "triton" else "plain"
    return cast("TokenTableOps", importlib.import_module(f"kimi_kernels.token_table.{module}"))


def stamp_of(step_id: int) -> int:
    """Make the mark that a draft step leaves on its proposals, and that the verify which reads them asks for."""
    return step_id & STAMP_MASK
