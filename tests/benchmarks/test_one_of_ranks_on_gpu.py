"""A rank alone on a GPU: sums over ranks with and without their norm, call after call in a graph."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from kimi_backend.runners.graphs.recorder import GraphRecorder
from kimi_kernels.collectives.kernel_norm import BLOCK, columns_of_a_program
from kimi_kernels.collectives.op import AllReduceNorm
from kimi_kernels.moe_experts.kernel_sum import sum_terms
from kimi_kernels.moe_experts.op import ExpertOutputs
from kimi_kernels.rms_norm.kernel import add_rms_norm
from slice_suite.one_of_ranks import one_of_ranks

pytestmark = pytest.mark.gpu
WIDTH, EPS = 7168, 1e-5


def in_two_shots(x: torch.Tensor, size: int, columns: int) -> torch.Tensor:
    """Every run of `size` blocks of columns summed: what the loop-back delivers as the other ranks' terms."""
    blocks = x.float().reshape(-1, size, columns)
    return blocks.sum(dim=1, keepdim=True).expand_as(blocks).reshape(x.shape).bfloat16()


@pytest.mark.parametrize("size", [2, 8])
def test_sums_and_norms_in_a_graph(size: int) -> None:
    device = torch.device("cuda")
    group = one_of_ranks(size, device, 0.0)
    all_reduce_norm: AllReduceNorm | None = group.all_reduce_norm
    assert all_reduce_norm is not None
    rows = [1, 64, 2, 4, 16, 1, 64, 64]
    inputs = [torch.randn(3, n, WIDTH, device=device).bfloat16() for n in rows]
    weight = torch.randn(WIDTH, device=device).bfloat16()
    results: list[tuple[torch.Tensor, ...]] = []

    def run() -> None:
        results.clear()
        for x, second, residual in inputs:
            results.append(
                (*all_reduce_norm(x, residual, weight, EPS, second), *all_reduce_norm(x, residual, weight, EPS))
            )

    replay = GraphRecorder(device).record(run)
    for _ in range(20):
        for given in inputs:
            given.copy_(torch.randn(given.shape, device=device))
        replay()
        torch.cuda.synchronize()
        for (x, second, residual), found in zip(inputs, results, strict=True):
            assert all_reduce_norm.takes(x)
            is_one_shot = all_reduce_norm.one_shot.takes(x)  # type: ignore[attr-defined]
            for term, (normed, total) in zip((x + second, x), (found[:2], found[2:]), strict=True):
                summed = size * term if is_one_shot else in_two_shots(term, size, columns_of_a_program(WIDTH))
                want, want_total = add_rms_norm(summed, residual, weight, EPS)
                torch.testing.assert_close(total, want_total, rtol=2**-7, atol=2**-5)
                torch.testing.assert_close(normed, want, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("rows", [1, 64])
def test_products_of_assignments_are_summed_before_they_are_sent(rows: int) -> None:
    device = torch.device("cuda")
    group = one_of_ranks(8, device, 0.0)  # holds the receive buffers, which kernels know by their addresses only
    all_reduce_norm: AllReduceNorm | None = group.all_reduce_norm
    assert all_reduce_norm is not None
    assignments = ExpertOutputs(
        outputs=torch.randn(8 * rows, WIDTH, device=device).bfloat16(),
        topk_ids=torch.randint(-1, 384, (rows, 8), dtype=torch.int32, device=device),
        topk_weights=torch.rand(rows, 8, device=device),
        first_expert=0,
        num_experts=384,
    )
    assignments.outputs[(assignments.topk_ids < 0).flatten()] = torch.nan
    second, residual = torch.randn(2, rows, WIDTH, device=device).bfloat16()
    weight = torch.randn(WIDTH, device=device).bfloat16()
    found = all_reduce_norm(assignments, residual, weight, EPS, second)
    for out, want in zip(found, all_reduce_norm(sum_terms(assignments), residual, weight, EPS, second), strict=True):
        assert torch.equal(out, want)


def test_a_sum_in_two_shots_on_a_gpu() -> None:
    device = torch.device("cuda")
    group = one_of_ranks(8, device, 5.0)
    x = torch.randn(64, WIDTH, device=device).bfloat16()
    for _ in range(5):
        torch.testing.assert_close(group.all_reduce(x), in_two_shots(x, 8, BLOCK), rtol=2**-7, atol=2**-5)
