"""Comparing results bit for bit."""

import torch
from torch import Tensor

Result = Tensor | tuple[Tensor, ...]


def normals(*shape: int, seed: int = 1) -> Tensor:
    """Standard normal float32, the same for the same arguments."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_same_bits(got: Result, expected: Result, what: str) -> None:
    """Raise unless both hold the same numbers, none of them NaN."""
    pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
    for got_part, expected_part in pairs:
        assert not got_part.isnan().any(), what
        assert torch.equal(got_part, expected_part), what


def pick_rows(result: Result, rows: Tensor) -> Result:
    return tuple(part[rows] for part in result) if isinstance(result, tuple) else result[rows]
