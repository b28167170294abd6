"""The compiled product of few rows, against torch in float32."""

import pytest
import torch

from kimi_kernels.linear.kernel_few_rows import FewRowsLaunch, few_rows_linear
from support.expert_layers import relative_error

pytestmark = pytest.mark.gpu
LAUNCHES = [
    FewRowsLaunch(16, 256, 4),
    FewRowsLaunch(64, 128, 4, ahead=4096),
    FewRowsLaunch(16, 256, 4, ahead=2048, splits=4),
]
BF16 = 2**-8


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("num_rows", [1, 4, 16, 64, 70])
@pytest.mark.parametrize(("out_features", "in_features"), [(2112, 7168), (384, 7168), (12288, 1536), (100, 200)])
def test_against_float32(launch: FewRowsLaunch, num_rows: int, out_features: int, in_features: int) -> None:
    torch.manual_seed(num_rows)
    x = torch.randn(num_rows, in_features, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16) * in_features**-0.5
    arrivals = torch.zeros(1024, dtype=torch.int32, device="cuda")
    expected = x.float() @ weight.float().T
    first = few_rows_linear(x, weight, launch, arrivals)
    assert relative_error(first.float(), expected) < BF16
    assert torch.equal(few_rows_linear(x, weight, launch, arrivals), first), "the order of sums is fixed"
    assert not arrivals.any()
