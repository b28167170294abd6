"""The output head: logits keep the bits that they were summed in."""

import pytest
import torch

from kimi_backend.layers.embedding import ParallelHead
from kimi_backend.parallel import SingleRank
from kimi_kernels.kernel_set import KernelSet
from support.interpreted import INTERPRETED


@pytest.mark.parametrize("name", ["plain", pytest.param("triton", marks=INTERPRETED)])
def test_two_close_logits_are_told_apart(name: str) -> None:
    """64 and 64 + 1/64: the same number in half precision, whose steps are 1/16 there."""
    weight = torch.zeros(5, 8, dtype=torch.float16)
    weight[:, 0] = torch.tensor([1, 64, 64, 2, 3])
    weight[2, 1] = 1 / 64
    x = torch.zeros(1, 8, dtype=torch.float16)
    x[:, :2] = 1
    head = ParallelHead(weight, getattr(KernelSet, name)(), SingleRank())
    logits = head.logits(x)
    assert logits.dtype == torch.float32
    assert logits[0].tolist() == [1, 64, 64 + 1 / 64, 2, 3]
