"""Shared by the tests of the ops."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> None:
    """Random arguments are the same every time."""
    torch.manual_seed(0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Run the test with two intra-op threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
