"""Compiles the sampling kernels for Hopper and prints what came out, as JSON by kernel.

A program of its own: with the interpreter switched on, as it is in the test process, nothing can be compiled.
"""

import dataclasses
from typing import Any

from kimi_kernels.sampling.kernel_check import check_kernel
from kimi_kernels.sampling.kernel_draw import draw_kernel
from kimi_kernels.sampling.kernel_select import select_kernel
from kimi_kernels.sampling.kernel_tuning import TUNING, Splits
from support.compile_record import answer
from support.hopper_compiler import compile_for_hopper

INT32 = ("USES_WORK", "WORK_BAD", "TOP_K", "PART_TOKEN", "PART_BAD", "TILE_BEST", "TICKETS", "STATE", "STATUS", "LIST")
INT64 = ("SEQUENCE", "TOKEN_INDEX", "SEED", "TOKEN_OF_COLUMN", "COLUMN_OF_TOKEN", "TOKEN_IDS")
FLOAT64 = ("PART_SCORE", "PART_MASS", "ROW_MASS")
FLOAT32 = ("LOGITS", "WORK", "TEMPERATURE", "TOP_P", "MIN_P", "PART_BEST", "PART_SUMS", "MAXIMA", "ROW_BEST")
TYPES = (
    dict.fromkeys((*INT32, "CANDIDATE", "NUM_LISTED"), "*i32")
    | dict.fromkeys(INT64, "*i64")
    | dict.fromkeys(FLOAT64, "*fp64")
    | dict.fromkeys(FLOAT32, "*fp32")
    | dict.fromkeys(("THRESHOLD", "ROW_BOUND"), "*u32")
)
PROCESSORS = 132
SPLITS = Splits.of(256, 163_840, TUNING)
CUT = {
    "SPLITS": SPLITS.count,
    "SPLIT_COLUMNS": SPLITS.columns,
    "EVEN": True,
    "SPLITS_P2": SPLITS.count,
    "STAGES": TUNING.stages,
}
PLAIN = {"HAS_MAP": False, "HAS_WORK": False, "PDL": True}


def compile_case(function: Any, num_warps: int, **constants: Any) -> dict[str, Any]:
    compiled = compile_for_hopper(
        function, TYPES, constants | PLAIN, {"row_stride", "num_columns"}, num_warps,
        enable_fp_fusion=False, launch_pdl=True, maxnreg=TUNING.draw_registers if function is draw_kernel else None,
    )  # fmt: skip
    return dataclasses.asdict(compiled) | {"num_warps": num_warps}


def main() -> None:
    reading = {"BLOCKS": TUNING.read_columns // 4, "DRAW_COLUMNS": TUNING.draw_columns}
    results = {
        "draw": compile_case(draw_kernel, TUNING.draw_warps, BLOCKS=TUNING.draw_columns // 4, **CUT),
        "check": compile_case(check_kernel, TUNING.read_warps, **reading, **CUT),
        "select": compile_case(select_kernel, TUNING.select_warps, BLOCK=TUNING.select_columns),
    }
    results["draw"]["programs_a_multiprocessor"] = -(-256 * CUT["SPLITS"] // PROCESSORS)
    answer(results)


if __name__ == "__main__":
    main()
