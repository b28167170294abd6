"""The kernel that sums over the ranks and norms at once has what it takes."""

from typing import Any

import torch

from kimi_backend.layers.residual import RankTerms, add_rms_norm
from kimi_kernels.kernel_set import KernelSet


class FusedSum:
    def takes(self, x: torch.Tensor) -> bool:
        return len(x) < 3

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        return given


class TwoEqualRanks:
    size, all_reduce_norm = 2, FusedSum()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_a_step_is_summed_and_normed_at_once_where_the_kernel_takes_it() -> None:
    ranks: Any = TwoEqualRanks()
    kernels, weight = KernelSet.plain(), torch.full((4,), 3.0)
    for num_rows in (2, 3):
        first, second, residual = (torch.randn(num_rows, 4) for _ in range(3))
        found = add_rms_norm(RankTerms(first, second), residual, weight, 1e-5, kernels, ranks)
        if num_rows < 3:
            assert found == (first, residual, weight, 1e-5, second)  # type: ignore[comparison-overlap]
            continue
        expected = kernels.add_rms_norm(2 * (first + second), residual, weight, 1e-5)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
