"""The configs that settings choose, and whether there are GPUs enough for them."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from kimi_backend.config import chosen_configs
from kimi_backend.config.chosen_configs import ChosenConfigs, check_gpus, draft_overrides
from kimi_backend.config.draft_config import DraftOverrides
from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ConfigError


def settings(**changes: Any) -> ServingSettings:
    return ServingSettings(**{"checkpoint": "/t", **changes})


def test_empty_settings_override_nothing_of_a_draft() -> None:
    assert draft_overrides(settings()) == DraftOverrides()
    given = settings(
        aux_layer_ids="2,-3, 4",
        draft_rope_theta=7.0,
        draft_beta_fast=8.0,
        draft_interleaved="true",
        draft_fc_norm="false",
        draft_norm_output="true",
    )
    assert draft_overrides(given) == DraftOverrides(
        rope_theta=7.0,
        beta_fast=8.0,
        interleaved=True,
        fc_norm=False,
        norm_output=True,
        aux_layer_ids=(2, -3, 4),
    )
    with pytest.raises(ConfigError, match="setting aux_layer_ids: '2,x' given, integers separated by commas"):
        draft_overrides(settings(aux_layer_ids="2,x"))


def test_a_target_may_stand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen_configs.KimiModelConfig, "from_hf_json", lambda path: f"target of {path}")
    monkeypatch.setattr(chosen_configs.Eagle3DraftConfig, "from_hf_json", lambda *given: given)
    alone = ChosenConfigs.read(settings())
    assert (alone.target, alone.draft) == ("target of /t", None)
    assert ChosenConfigs.read(settings(draft="/d")).draft == ("/d", "target of /t", DraftOverrides())
    with pytest.raises(ConfigError, match="setting checkpoint: empty"):
        ChosenConfigs.read(ServingSettings())


@pytest.mark.parametrize(
    ("device", "size", "found", "message"),
    [
        ("cuda", 2, 2, None),
        ("cuda", 1, 8, None),
        ("cpu", 4, 0, None),
        ("cuda", 1, 0, "setting device: cuda given, but the CUDA driver shows no GPUs here; cpu is allowed"),
        ("cuda", 4, 2, "tensor_parallel_size: 4 given, but the CUDA driver shows 2 GPUs here; 1 to 2 are allowed"),
    ],
)
def test_gpus_are_counted_before_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch, device: str, size: int, found: int, message: str | None
) -> None:
    monkeypatch.setattr(chosen_configs, "_num_gpus", lambda: found)
    given = settings(device=device, tensor_parallel_size=size)
    if message is None:
        check_gpus(given)
        return
    with pytest.raises(ConfigError, match=message):
        check_gpus(given)


@pytest.mark.parametrize(("init", "count", "found"), [(0, 0, 3), (100, 0, 0), (0, 100, 0)])
def test_the_driver_says_how_many_there_are(monkeypatch: pytest.MonkeyPatch, init: int, count: int, found: int) -> None:
    def tell(pointer: Any) -> int:
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = 3
        return count

    driver = SimpleNamespace(cuInit=lambda flags: init if flags == 0 else 1, cuDeviceGetCount=tell)
    monkeypatch.setattr(chosen_configs.ctypes, "CDLL", lambda name: driver)
    assert chosen_configs._num_gpus() == found


def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError

    monkeypatch.setattr(chosen_configs.ctypes, "CDLL", missing)
    assert chosen_configs._num_gpus() == 0
