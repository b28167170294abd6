"""Which kernels run where."""

import pytest
import torch

from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ConfigError
from kimi_backend.runners.placement import place


@pytest.mark.parametrize(("setting", "name"), [("auto", "cpu"), ("cpu", "cpu"), ("reference", "reference")])
def test_a_cpu_takes_the_faster_of_its_row_invariant_sets(setting: str, name: str) -> None:
    placement = place(ServingSettings(device="cpu", kernels=setting))
    assert placement.kernels.name == name
    assert placement.kernels.row_invariant
    assert placement.dtype == placement.kv_dtype == torch.float32


def test_kernels_of_another_device_are_refused() -> None:
    with pytest.raises(ConfigError, match="triton given, which does not run on cpu; reference or cpu is allowed there"):
        place(ServingSettings(device="cpu", kernels="triton"))
