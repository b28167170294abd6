"""Compiles the expert and linear kernels for Hopper and prints what came out, as JSON by case.

A program of its own: with the interpreter switched on, as it is in the test process, nothing can be compiled.
"""

import dataclasses
from typing import Any

from kimi_kernels.linear.kernel import tiled_linear_kernel
from kimi_kernels.linear.kernel_dequantize import dequantize_kernel
from kimi_kernels.moe_experts.kernel_align import place_kernel
from kimi_kernels.moe_experts.kernel_down import down_sorted_kernel
from kimi_kernels.moe_experts.kernel_gate_up import gate_up_sorted_kernel, gate_up_unsorted_kernel
from kimi_kernels.moe_experts.kernel_persistent import multiply_persistent_kernel
from kimi_kernels.moe_experts.kernel_tall import down_tall_kernel, gate_up_tall_kernel
from kimi_kernels.moe_route.kernel import route_kernel
from kimi_kernels.moe_route.kernel_choose import sigmoid_scores
from support.compile_record import answer
from support.hopper_compiler import compile_for_hopper

BF16 = ("X", "HIDDEN", "OUT", "PRODUCTS")
FLOAT = ("PARTIALS", "TOPK_WEIGHTS", "LOGITS", "BIAS")
INTS = ("ARRIVALS", "TOPK_IDS", "TILE_ENTRIES", "TILE_ASSIGNMENTS", "NUM_TILES", "COUNTS")
SMALL = {"scaling_factor": "fp32", "SLOTS": "*i64"}
TYPES = dict.fromkeys(BF16, "*bf16") | SMALL | dict.fromkeys(FLOAT, "*fp32") | dict.fromkeys(INTS, "*i32")
WEIGHT_TYPES = {
    "int4": ("*i16", "*i64"),
    "mxfp4": ("*i16", "*i32"),
    "fp8": ("*i16", "*fp32"),
    "float": ("*bf16", "*fp32"),
}
WORDS = {"int4": 32, "mxfp4": 32, "fp8": 64, "float": 64}
DIVISIBLE = {"x_stride", "in_features", "intermediate_size", "out_features", "num_columns"}

ROUTER = {
    **{"TOP_K": 8, "TOP_K_PADDED": 8, "TOPK_GROUPS": 1, "GROUPS": 1, "SIZE": 512, "SELECT_GROUPS": False},
    **{"RENORMALIZE": True, "SCORES": sigmoid_scores},
}
RESIDENT = {"SCALE_WEIGHTS": False, "RESIDENT_STEPS": 2}


def compile_case(function: Any, kind: str, num_warps: int, **constants: Any) -> dict[str, Any]:
    tiles, scales = WEIGHT_TYPES[kind]
    if "KIND" in function.arg_names:
        common = {"KIND": kind, "WORDS": WORDS[kind], "EVEN": True, "PORTABLE": False, "PDL": True}
        constants |= {name: value for name, value in common.items() if name in function.arg_names}
    if "PDL" in function.arg_names:
        constants |= {"PDL": True}
    compiled = compile_for_hopper(function, TYPES | {"TILES": tiles, "SCALES": scales}, constants, DIVISIBLE, num_warps)
    return dataclasses.asdict(compiled)


def main() -> None:
    few = {"COLUMNS": 8, "STAGES": 4, "SPLITS": 8}
    results = {
        "gate_up unsorted": compile_case(gate_up_unsorted_kernel, "int4", 4, **few),
        "route": compile_case(route_kernel, "int4", 1, **ROUTER),
        "down unsorted": compile_case(down_sorted_kernel, "int4", 4, COLUMNS=8, STAGES=3, SORTED=False, **RESIDENT),
        "place": compile_case(place_kernel, "int4", 4, COLUMNS=16, CHUNK=512, BINS=512, SINGLE=True),
        "linear 8": compile_case(tiled_linear_kernel, "int4", 4, COLUMNS=8, STAGES=4, SCALE_WEIGHTS=False, SPLITS=1),
    }
    for kind, columns in (("int4", 8), ("int4", 16), ("mxfp4", 16), ("fp8", 16), ("int4", 32), ("fp8", 32)):
        constants = {"COLUMNS": columns, "STAGES": 4 if columns <= 16 else 3, "SCALE_WEIGHTS": columns == 32}
        results[f"gate_up sorted {kind} {columns}"] = compile_case(gate_up_sorted_kernel, kind, 4, **constants)
    results["down resident 8"] = compile_case(
        down_sorted_kernel, "int4", 4, COLUMNS=8, STAGES=4, SORTED=True, **RESIDENT
    )
    wide = {"COLUMNS": 16, "STAGES": 4, "SCALE_WEIGHTS": False, "RESIDENT_STEPS": 0, "SORTED": True}
    results["down sorted int4 16"] = compile_case(down_sorted_kernel, "int4", 4, **wide)
    tall = {"STAGES": 4, "WARPS": 8}
    for kind, name in (("int4", "gate_up tall 64"), ("mxfp4", "gate_up tall mxfp4 64")):
        results[name] = compile_case(gate_up_tall_kernel, kind, 8, COLUMNS=64, ROWS=128, **tall)
    results["down tall mxfp4 128"] = compile_case(down_tall_kernel, "mxfp4", 8, COLUMNS=128, ROWS=256, **tall)
    for kind, activates in (("int4", True), ("mxfp4", False)):
        name = f"{'gate_up' if activates else 'down'} persistent {kind}"
        results[name] = compile_case(multiply_persistent_kernel, kind, 8, ACTIVATE=activates, STAGES=3)
    for kind in ("int4", "fp8"):
        results[f"dequantize {kind}"] = compile_case(dequantize_kernel, kind, 4)
    answer(results)


if __name__ == "__main__":
    main()
