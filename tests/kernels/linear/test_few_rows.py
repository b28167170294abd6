"""The product of few rows in the interpreter, against torch."""

import pytest
import torch

from kimi_kernels.linear.kernel_few_rows import FewRowsLaunch, few_rows_linear
from support.expert_layers import relative_error
from support.interpreted import INTERPRETED

pytestmark = INTERPRETED
LAUNCHES = [FewRowsLaunch(16, 64, 3), FewRowsLaunch(32, 128, 2), FewRowsLaunch(16, 64, 2, splits=4)]


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize(
    ("num_rows", "out_features", "in_features"),
    [(1, 64, 256), (3, 40, 100), (8, 33, 512), (9, 16, 64), (16, 70, 130), (70, 40, 256)],
)
def test_shapes(launch: FewRowsLaunch, num_rows: int, out_features: int, in_features: int) -> None:
    torch.manual_seed(num_rows)
    x, weight = torch.randn(num_rows, in_features), torch.randn(out_features, in_features)
    arrivals = torch.zeros(8, dtype=torch.int32)
    for _ in range(2):  # the second call finds the scratch as the first left it
        assert relative_error(few_rows_linear(x, weight, launch, arrivals), x @ weight.T) < 2e-6
    assert not arrivals.any()


def test_another_dtype_than_the_rows() -> None:
    x, weight = torch.randn(3, 64).half(), torch.randn(48, 64).half()
    out = few_rows_linear(x, weight, LAUNCHES[0], dtype=torch.float32)
    assert out.dtype == torch.float32
    assert relative_error(out, x.float() @ weight.float().T) < 2e-6


def test_rows_may_be_strided_and_their_neighbours_nan() -> None:
    torch.manual_seed(0)
    wide = torch.full((5, 96), float("nan"))
    wide[:3, 16:80] = torch.randn(3, 64)
    x, weight = wide[:3, 16:80], torch.randn(48, 64)
    assert relative_error(few_rows_linear(x, weight, LAUNCHES[0]), x @ weight.T) < 2e-6


def test_a_nan_row_stays_alone() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 64), torch.randn(32, 64)
    x[2] = float("nan")
    out = few_rows_linear(x, weight, LAUNCHES[0])
    assert out[2].isnan().all()
    assert out[[0, 1, 3]].isfinite().all()
