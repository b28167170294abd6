"""Memory that no sampling kernel wrote is poison."""

import pytest
import torch

from kimi_kernels.sampling.kernel_launch import SamplingCall


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that no kernel wrote is not a number, or no token, so that reading it changes a draw."""
    if torch.cuda.is_available():
        return

    def poisoned(call: SamplingCall, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, torch.nan if dtype.is_floating_point else 2**30 + 7, dtype=dtype)

    monkeypatch.setattr(SamplingCall, "_new", poisoned)
