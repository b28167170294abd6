"""Norms, rotary embedding, activation and cache writes at Kimi-K2's widths."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from kernel_cases import Case, Prepared, num_input_sets, relative_error
from kimi_kernels import KernelSet

HIDDEN, LORA_RANK, ROPE_DIM, BLOCK = 7168, 512, 64, 64
INTERMEDIATE = 2048
EPS = 1e-6
MAX_POSITIONS = 8192
ERROR_LIMIT = 6e-3
"""One rounding to bf16 is 2^-9; the reference rounds too."""
ROWS = (4, 64, 1024, 8192)
LAUNCH_LIMIT_US = {4: 6.0, 64: 6.0}
"""Below some hundred rows a launch in a graph is all there is."""


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


def cases(kernels: KernelSet) -> list[Case]:
    reference = KernelSet.plain()
    found = []
    for rows in ROWS:
        wide, latent = rows * HIDDEN * 2, rows * (LORA_RANK + ROPE_DIM) * 2
        table = [
            ("add_rms_norm", 4 * wide, add_rms_norm_inputs, {4: "vLLM 5.1", 64: "FlashInfer 4.9"}.get(rows, "")),
            ("rms_norm", 2 * wide, rms_norm_inputs, ""),
            ("concat_rms_norm", 4 * wide, concat_inputs, ""),
            ("chunked_rms_norm", 6 * wide, chunked_inputs, ""),
            ("store_latent", 2 * latent, store_latent_inputs, {4: "vLLM 4.7", 64: "vLLM 4.4"}.get(rows, "")),
            ("rope", 2 * rows * 8 * ROPE_DIM * 2, rope_inputs, ""),
            ("silu_mul", 3 * rows * INTERMEDIATE * 2, silu_inputs, ""),
            ("store_kv", 4 * rows * 8 * 128 * 2, store_kv_inputs, ""),
        ]
        for op, num_bytes, make, peer in table:
            limited = op in ("add_rms_norm", "store_latent")
            found.append(
                Case(
                    op=op,
                    name=f"{rows} rows",
                    num_bytes=num_bytes,
                    num_flops=0,
                    prepare=functools.partial(prepare, kernels, reference, op, make, rows, num_bytes),
                    limit_us=LAUNCH_LIMIT_US.get(rows) if limited else None,
                    peer=peer,
                )
            )
    return found


def prepare(
    kernels: KernelSet,
    reference: KernelSet,
    op: str,
    make: Callable[[int], tuple[object, ...]],
    rows: int,
    num_bytes: float,
) -> Prepared:
    inputs = [make(rows) for _ in range(num_input_sets(num_bytes, at_most=128))]
    run, plain = getattr(kernels, op), getattr(reference, op)

    def check() -> float:
        results, expected = run(*inputs[0]), plain(*twin(inputs[0]))
        if results is None:  # in place: compare what it wrote
            results, expected = written(inputs[0]), written(TWINS[-1])
        pairs = zip(results, expected, strict=True) if isinstance(results, tuple) else [(results, expected)]
        return max(relative_error(out, want, ERROR_LIMIT) for out, want in pairs)

    return Prepared(calls=[functools.partial(run, *arguments) for arguments in inputs], check=check)


TWINS: list[tuple[object, ...]] = []


def twin(arguments: tuple[object, ...]) -> tuple[object, ...]:
    """A copy of the arguments for the reference, remembered so that what it wrote can be looked at."""
    TWINS[:] = [tuple(x.clone() if isinstance(x, Tensor) else x for x in arguments)]
    return TWINS[-1]


def written(arguments: tuple[object, ...]) -> Tensor:
    """The cache among the arguments: the largest tensor."""
    return max((x for x in arguments if isinstance(x, Tensor)), key=Tensor.numel)


def rms_norm_inputs(rows: int) -> tuple[object, ...]:
    return randn(rows, HIDDEN), randn(HIDDEN), EPS


def add_rms_norm_inputs(rows: int) -> tuple[object, ...]:
    return randn(rows, HIDDEN), randn(rows, HIDDEN), randn(HIDDEN), EPS


def concat_inputs(rows: int) -> tuple[object, ...]:
    return randn(rows, HIDDEN), randn(HIDDEN), randn(rows, HIDDEN), randn(HIDDEN), EPS


def chunked_inputs(rows: int) -> tuple[object, ...]:
    return randn(rows, 3 * HIDDEN), randn(3, HIDDEN), EPS


def angles(rows: int) -> tuple[Tensor, Tensor]:
    cos_sin = torch.randn(MAX_POSITIONS, ROPE_DIM, device="cuda")
    return cos_sin, torch.randint(MAX_POSITIONS, (rows,), device="cuda")


def rope_inputs(rows: int) -> tuple[object, ...]:
    return randn(rows, 8, 192)[:, :, 128:], *angles(rows), True


def store_latent_inputs(rows: int) -> tuple[object, ...]:
    blocks = max(64, 2 * rows // BLOCK)
    cache = torch.zeros(blocks, BLOCK, LORA_RANK + ROPE_DIM, dtype=torch.bfloat16, device="cuda")
    slots = torch.randperm(blocks * BLOCK, device="cuda")[:rows]
    kv_a = randn(rows, 2112)[:, 1536:]
    return kv_a, randn(LORA_RANK), EPS, *angles(rows), True, cache, slots


def silu_inputs(rows: int) -> tuple[object, ...]:
    return (randn(rows, 2 * INTERMEDIATE),)


def store_kv_inputs(rows: int) -> tuple[object, ...]:
    blocks = max(64, 2 * rows // BLOCK)
    cache = torch.zeros(2, blocks, BLOCK, 8, 128, dtype=torch.bfloat16, device="cuda")
    slots = torch.randperm(blocks * BLOCK, device="cuda")[:rows]
    return randn(rows, 8, 128), randn(rows, 8, 128), cache, slots
