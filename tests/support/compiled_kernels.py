"""Compile Triton-language kernels for an H100 (sm_90) on a machine without one, and read what came out.

Run as a program it prints one JSON object, kernel name -> what `inspect_kernel` found: tests compile in a process of
their own, because the test process runs kernels in Triton-language's interpreter. Uses the cuobjdump of Triton's wheel.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from support.compile_record import answer, find_in_compiled

WIDE = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)"
HALF_WIDE = "NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)"
OPCODES = ("HGMMA", "WARPGROUP.ARRIVE", "HMMA", "LDGSTS", "UTMALDG", "LDL", "STL", "STG.E.128", "LDG.E.128.STRONG.SYS")


@dataclass(frozen=True, kw_only=True)
class Build:
    """One kernel with the types and constants of one launch."""

    module: str
    function: str
    types: dict[str, str]
    constants: dict[str, object]
    num_warps: int
    num_stages: int = 2
    is_gluon: bool = False
    multiples_of_16: tuple[str, ...] = field(default=())
    """Arguments besides pointers that the launch specialises on."""


def cuobjdump() -> Path:
    """Triton's own copy; may be absent from some builds of it."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def inspect_kernel(build: Build) -> dict[str, int]:
    """Registers, stack bytes a thread (spills), shared memory bytes and counts of some opcodes."""
    import importlib

    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    function = getattr(importlib.import_module(build.module), build.function)
    names = function.arg_names
    aligned = [name for name, kind in build.types.items() if kind.startswith("*") or name in build.multiples_of_16]
    source = (GluonASTSource if build.is_gluon else ASTSource)(
        function,
        signature={name: build.types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in build.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages}
    return find_in_compiled(source, GPUTarget("cuda", 90, 32), options, _look, OPCODES)


def _look(compiled: Any) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _run(cuobjdump(), "-res-usage", cubin)
        sass = _run(cuobjdump(), "-sass", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    counts = {opcode: len(re.findall(rf"\b{opcode}\b", sass)) for opcode in OPCODES}
    return {"registers": int(found[1]), "stack": int(found[2]), "shared": compiled.metadata.shared, **counts}


def _run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def mla_hopper(rows: int, is_float8: bool, *, has_row_keys: bool = False) -> Build:
    """The Hopper kernel of `mla_decode` for tiles of `rows`, whose keys are told if `has_row_keys`."""
    from kimi_kernels.mla_decode import kernel_hopper_launch as launch

    if is_float8:
        boxes, stages = launch.FLOAT8_TILES[rows]
        inputs = {
            "q": "*bf16",
            "cache": "*fp8e4nv",
            "latents": f"tensordesc<i16[64, 64],{WIDE}>",
            "rope_keys": f"tensordesc<i16[64, 32],{HALF_WIDE}>",
        }
        constants: dict[str, object] = {"queries": None, "rope_queries": None, "BOXES": boxes, "STAGES": stages}
    else:
        inputs = {
            "cache": "*bf16",
            "queries": f"tensordesc<bf16[{rows}, 256],{WIDE}>",
            "rope_queries": f"tensordesc<bf16[{rows}, 64],{WIDE}>",
            "latents": f"tensordesc<bf16[64, 256],{WIDE}>",
            "rope_keys": f"tensordesc<bf16[64, 64],{WIDE}>",
        }
        constants = {"q": None, "BOXES": 1, "STAGES": 2}
    types = {
        **inputs,
        **dict.fromkeys(("block_table", "records"), "*i32"),
        "out": "*bf16",
        **dict.fromkeys(("lse", "part_out", "part_lse"), "*fp32"),
        **dict.fromkeys(("table_stride", "num_seqs", "max_blocks", "num_blocks"), "i32"),
        **dict.fromkeys(("num_heads", "num_teams", "team_size"), "i32"),
        **dict.fromkeys(("scale", "kv_scale"), "fp32"),
    }
    if has_row_keys:
        types["row_keys"] = "*i32"
    else:
        constants["row_keys"] = None
    warps = launch.NUM_WARPS_FLOAT8 if is_float8 else launch.NUM_WARPS[rows]
    sizes = {"L": 512, "P": 64, "PAGE": 64}
    return Build(
        module="kimi_kernels.mla_decode.kernel_hopper",
        function="attend_hopper_kernel",
        types=types,
        constants={**sizes, "R": rows, "FLOAT8": is_float8, "LSE": True, "WARPS": warps, **constants},
        num_warps=warps,
        is_gluon=True,
    )


def mla_pairs(*, has_row_keys: bool = False) -> Build:
    """The Hopper kernel of `mla_decode` for 64 rows over 16-bit latents."""
    whole = mla_hopper(64, False, has_row_keys=has_row_keys)
    dropped = ("q", "R", "FLOAT8", "BOXES", "STAGES", "WARPS")
    return replace(
        whole,
        module="kimi_kernels.mla_decode.kernel_hopper_pairs",
        function="attend_pairs_kernel",
        constants={name: value for name, value in whole.constants.items() if name not in dropped},
        num_warps=4,
    )


def mla_any(rows: int) -> Build:
    """`attend_kernel` of `mla_decode`, which takes any block size."""
    import triton.language as tl

    types = {
        **dict.fromkeys(("q", "cache", "out"), "*bf16"),
        **dict.fromkeys(("block_table", "records"), "*i32"),
        **dict.fromkeys(("lse", "part_out", "part_lse"), "*fp32"),
        **dict.fromkeys(
            ("q_token_stride", "q_head_stride", "table_stride", "num_heads", "num_teams", "team_size"), "i32"
        ),
        **dict.fromkeys(("scale", "kv_scale"), "fp32"),
    }
    constants = {"L": 512, "P": 64, "PAGE": 16, "R": rows, "K": 64, "SWAP": rows < 64, "LSE": True, "STAGES": 2}
    return Build(
        module="kimi_kernels.mla_decode.kernel_attend",
        function="attend_kernel",
        types=types,
        constants={"row_keys": None, **constants, "MATH": tl.bfloat16},
        num_warps=8,
        multiples_of_16=("q_token_stride", "q_head_stride"),
    )


def prefill_types(keys: int, values: str, num_tiles: str, layout: str = "") -> dict[str, str]:
    """Arguments of `mla_prefill`'s kernels at 192/128, for tiles of so many keys. values, num_tiles: their names."""
    sizes = ("q_token_stride", "q_head_stride", "start", "chunk", "num_seqs", "num_heads", num_tiles)
    return {
        **dict.fromkeys(("q", "out"), "*bf16"),
        "k_nope": f"tensordesc<bf16[{keys}, 128]{layout}>",
        "k_rope": f"tensordesc<bf16[{keys}, 64]{layout}>",
        values: f"tensordesc<bf16[{keys}, 128]{layout}>",
        **dict.fromkeys(("cu_seqlens_q", "seq_lens"), "*i32"),
        **dict.fromkeys(("state_out", "state_lse"), "*fp32"),
        **dict.fromkeys(sizes, "i32"),
        "scale": "fp32",
    }


def prefill() -> Build:
    """`attend_kernel` of `mla_prefill` at 192/128."""
    import triton.language as tl

    from kimi_kernels.mla_prefill import kernel

    keys = kernel.TILE_KEYS
    constants = {"P": 128, "Q": 64, "V": 128, "R": kernel.TILE_ROWS, "K": keys, "FIRST": True, "LAST": True}
    return Build(
        module="kimi_kernels.mla_prefill.kernel_attend",
        function="attend_kernel",
        types=prefill_types(keys, "values", "num_tiles"),
        constants={**constants, "MATH": tl.bfloat16, "STAGES": kernel.ATTEND_STAGES, "PDL": True},
        num_warps=kernel.ATTEND_WARPS,
        num_stages=kernel.ATTEND_STAGES,
        multiples_of_16=("q_token_stride", "q_head_stride", "chunk"),
    )


def prefill_hopper(*, is_first: bool, is_last: bool) -> Build:
    """The kernel of `mla_prefill` on Hopper; of one chunk, or one that goes on from the chunk before."""
    from kimi_kernels.mla_prefill import kernel_hopper
    from kimi_kernels.mla_prefill import kernel_hopper_launch as launch

    sizes = {"P": 128, "Q": 64, "V": 128, "R": launch.WARPGROUP_ROWS, "K": launch.TILE_KEYS, "STAGES": launch.STAGES}
    return Build(
        module="kimi_kernels.mla_prefill.kernel_hopper",
        function="attend_hopper_kernel",
        types=prefill_types(launch.TILE_KEYS, "v", "num_row_tiles", f",{WIDE}"),
        constants={**sizes, "FIRST": is_first, "LAST": is_last, "PDL": True},
        num_warps=kernel_hopper.WARPS.value,
        is_gluon=True,
        multiples_of_16=("q_token_stride", "q_head_stride", "chunk"),
    )


def mha(cache: str = "bf16") -> Build:
    """`attend_kernel` of `mha_attention` for 64 rows, head dim 128.

    Args:
        cache: Triton-language's name of its element type.
    """
    import triton.language as tl

    types = {
        **dict.fromkeys(("q", "out"), "*bf16"),
        **dict.fromkeys(("keys", "values"), f"*{cache}"),
        **dict.fromkeys(("block_table", "cu_seqlens_q", "seq_lens"), "*i32"),
        **dict.fromkeys(("part_out", "part_lse"), "*fp32"),
        **dict.fromkeys(
            ("q_token_stride", "q_head_stride", "table_stride", "num_tokens", "num_heads", "num_kv_heads"), "i32"
        ),
        **dict.fromkeys(("num_tiles", "window"), "i32"),
        **dict.fromkeys(("scale", "value_scale"), "fp32"),
    }
    constants = {"D": 128, "PAGE": 64, "R": 64, "K": 64, "SPLITS": 4, "STAGES": 3, "PDL": True}
    return Build(
        module="kimi_kernels.mha_attention.kernel_attend",
        function="attend_kernel",
        types=types,
        constants={**constants, "MATH": tl.bfloat16},
        num_warps=4,
        num_stages=3,
        multiples_of_16=("q_token_stride", "q_head_stride"),
    )


def streamed_linear(num_rows: int, out_features: int) -> Build:
    """The product of few rows with a plain weight."""
    from kimi_kernels.linear.stream_launch import stream_launch

    launch = stream_launch(num_rows, out_features)
    types = {
        "weights": f"tensordesc<bf16[{launch.tile_rows}, {launch.step}],{WIDE}>",
        "xs": f"tensordesc<bf16[{launch.columns}, {launch.step}],{WIDE}>",
        "OUT": "*bf16",
        "PARTIALS": "*fp32",
        "ARRIVALS": "*i32",
        **dict.fromkeys(("num_rows", "in_features", "out_features"), "i32"),
    }
    tile = {"TILE_ROWS": launch.tile_rows, "STEP": launch.step, "COLUMNS": launch.columns}
    return Build(
        module="kimi_kernels.linear.kernel_stream",
        function="stream_linear_kernel",
        types=types,
        constants={**tile, "SPLITS": launch.splits, "STAGES": launch.stages},
        num_warps=4,
        is_gluon=True,
    )


def collectives(name: str, size: int) -> Build:
    """A collective over `size` ranks: "sum" of bf16, in one shot or two, "gather" of 32-bit words."""
    from kimi_kernels.collectives.receive_buffers import BLOCK_BYTES, NUM_SECTIONS

    kind, unit, itemsize = ("*i32", "words", 4) if name == "gather" else ("*bf16", "elements", 2)
    sizes = [f"num_{unit}", "part_elements" if name == "sum in two shots" else f"slot_{unit}"]
    sizes += ["row_words"] if name == "gather" else []
    types = {"x": kind, "out": kind, "buffers": "*i64", "calls": "*i32", **dict.fromkeys(["rank", *sizes], "i32")}
    return Build(
        module="kimi_kernels.collectives.kernel" + ("_two_shot" if name == "sum in two shots" else ""),
        function={
            "sum": "one_shot_all_reduce_kernel",
            "gather": "all_gather_kernel",
            "sum in two shots": "two_shot_all_reduce_kernel",
        }[name],
        types=types,
        constants={"SIZE": size, "BLOCK": BLOCK_BYTES // itemsize, "SECTIONS": NUM_SECTIONS, "PDL": True},
        num_warps=8,
        multiples_of_16=tuple(sizes),
    )


def all_reduce_norm(name: str, size: int) -> Build:
    """A sum over `size` ranks with its norm, of two addends in rows of 7168, in one shot or two; "of assignments": the
    first addend is the sum of eight."""
    from kimi_kernels.collectives import kernel_norm

    tensors = ("x", "second", "residual", "weight", "out", "total")
    sizes = ("residual_stride", "width", "columns", "slot_elements", "most_programs")
    types = dict.fromkeys(tensors, "*bf16") | {"buffers": "*i64", "calls": "*i32", "squares": "*i32"}
    types |= dict.fromkeys(("rank", *sizes), "i32") | {"eps": "fp32"}
    top_k = 8 if "of assignments" in name else 0
    if top_k:
        types |= {"topk_ids": "*i32", "topk_weights": "*fp32", "first_expert": "i32", "num_experts": "i32"}
    constants = {
        "TOP_K": top_k,
        "SIZE": size,
        "PROGRAMS": kernel_norm.ROW_BLOCKS,
        "BLOCK": kernel_norm.BLOCK,
        "SECTIONS": kernel_norm.NUM_SECTIONS,
    }
    return Build(
        module="kimi_kernels.collectives.kernel_norm",
        function="all_reduce_norm_kernel",
        types=types,
        constants=constants | {"HAS_SECOND": True, "TWO_SHOT": name.endswith("in two shots"), "PDL": True},
        num_warps=8,
        multiples_of_16=sizes,
    )


COLLECTIVES: dict[str, Callable[[], Build]] = {
    f"{name} over {size} ranks": lambda make=make, name=name, size=size: make(name, size)  # type: ignore[misc]
    for make, names in (
        (collectives, ("sum", "gather", "sum in two shots")),
        (all_reduce_norm, ("norm", "norm in two shots", "norm of assignments", "norm of assignments in two shots")),
    )
    for name in names
    for size in (2, 8)
}
"""Four ranks may have as many programs as eight, and those need more registers."""
BUILDS: dict[str, Callable[[], Build]] = {
    **{f"mla hopper {rows} {name}": lambda rows=rows, name=name: mla_hopper(rows, name == "float8")  # type: ignore[misc]
       for rows in (16, 32, 64) for name in ("bf16", "float8")},
    "mla pairs": mla_pairs,
    "mla hopper 64 row keys": lambda: mla_hopper(64, False, has_row_keys=True),
    "mla pairs row keys": lambda: mla_pairs(has_row_keys=True),
    **{f"mla any {rows}": lambda rows=rows: mla_any(rows) for rows in (32, 64)},  # type: ignore[misc]
    "prefill": prefill,
    "prefill hopper": lambda: prefill_hopper(is_first=True, is_last=True),
    "prefill hopper first of several": lambda: prefill_hopper(is_first=True, is_last=False),
    "prefill hopper goes on": lambda: prefill_hopper(is_first=False, is_last=False),
    "mha": mha,
    "mha float8": lambda: mha("fp8e4nv"),
    **{f"streamed {rows} x {out}": lambda rows=rows, out=out: streamed_linear(rows, out)  # type: ignore[misc]
       for rows, out in ((8, 2112), (8, 36_864), (16, 7168))},
    **{f"streamed head {rows}": lambda rows=rows: streamed_linear(rows, 163_840) for rows in (32, 64)},  # type: ignore[misc]
}  # fmt: skip


if __name__ == "__main__":
    named = [word for word in sys.argv[1:] if word != "--record"]
    wanted = named or [*BUILDS, *(COLLECTIVES if "--record" in sys.argv else ())]
    answer({name: inspect_kernel((BUILDS | COLLECTIVES)[name]()) for name in wanted})
