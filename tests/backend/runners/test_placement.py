"""The kernels that run on each device."""

import pytest
import torch

from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ConfigError
from kimi_backend.runners.load.placement import place


@pytest.mark.parametrize("setting", ["auto", "plain"])
def test_a_cpu_takes_the_row_invariant_set(setting: str) -> None:
    placement = place(ServingSettings(device="cpu", kernels=setting))
    assert placement.kernels.name == "plain"
    assert placement.kernels.row_invariant
    assert placement.dtype == placement.kv_dtype == torch.float32


def test_kernels_of_another_device_are_refused() -> None:
    with pytest.raises(ConfigError, match="triton given, which does not run on cpu; plain is allowed there"):
        place(ServingSettings(device="cpu", kernels="triton"))


def test_each_rank_has_a_gpu_of_its_own_and_there_must_be_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "one" if index < 3 else kind)
    kind = "one"
    settings = ServingSettings(device="cuda", tensor_parallel_size=4)
    assert [place(settings, rank).device for rank in (0, 3)] == [torch.device("cuda:0"), torch.device("cuda:3")]
    with pytest.raises(ConfigError, match="tensor_parallel_size: 8 given, torch sees 4 GPUs here; 1 to 4 are allowed"):
        place(ServingSettings(device="cuda", tensor_parallel_size=8))
    kind = "two"
    place(ServingSettings(device="cuda", tensor_parallel_size=3))
    with pytest.raises(ConfigError, match="the first 4 GPUs are one, one, one, two; GPUs of one kind are allowed"):
        place(settings)
