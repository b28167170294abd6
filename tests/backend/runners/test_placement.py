"""The kernels that run on each device."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kimi_backend.checkpoint.presets import DraftKind
from kimi_backend.config.memory_plan import GIB
from kimi_backend.config.quantization_config import QuantizationMethod
from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ConfigError
from kimi_backend.runners.load.loading import load_draft_runner
from kimi_backend.runners.load.opened_checkpoints import Checkpoints, _memory_bytes, memory_plan
from kimi_backend.runners.load.placement import place
from support.checkpoint_folders import make_tiny


@pytest.mark.parametrize("setting", ["auto", "plain"])
def test_a_cpu_takes_the_row_invariant_set(setting: str) -> None:
    placement = place(ServingSettings(device="cpu", kernels=setting))
    assert placement.kernels.name == "plain"
    assert placement.kernels.row_invariant
    assert placement.dtype == placement.kv_dtype == torch.float32


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert place(ServingSettings(device="auto")).device == torch.device("cpu")
    with pytest.raises(ConfigError, match="setting device: cuda given, but torch sees no GPU here; cpu is allowed"):
        place(ServingSettings(device="cuda"))


def test_a_folder_of_each_model_is_needed(tmp_path: Path) -> None:
    settings = ServingSettings(device="cpu")
    with pytest.raises(ConfigError, match="setting checkpoint: empty, the folder of a checkpoint is needed"):
        Checkpoints.open(settings, place(settings))
    folder = make_tiny(tmp_path / "tiny", QuantizationMethod.NONE, DraftKind.MLA)
    with pytest.raises(ConfigError, match="setting draft: empty, the folder of a draft is needed to load the draft"):
        load_draft_runner(ServingSettings(checkpoint=str(folder), device="cpu"))


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


def test_memory_is_what_a_setting_says_or_a_ranks_part_of_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1001}.__getitem__)

    def found(**changes: Any) -> int:
        settings = ServingSettings(device="cpu", **changes)
        return _memory_bytes(settings, place(settings))

    assert found() == 4096 * 1001
    assert found(tensor_parallel_size=2) == 4096 * 1001 // 2
    assert found(gpu_memory_gib=1.5, tensor_parallel_size=2) == 3 * GIB // 2


def test_memory_of_gpus_is_a_share_of_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [100, 300, 200]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=sizes[index]))
    gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    for num_ranks, least in ((1, 300), (2, 100), (3, 100), (4, 100)):
        assert _memory_bytes(ServingSettings(tensor_parallel_size=num_ranks), gpu) == int(least * 0.92)


def test_pools_on_a_cpu_take_a_quarter_of_a_gib_where_nothing_is_said(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny", QuantizationMethod.NONE, DraftKind.MLA)
    settings = ServingSettings(checkpoint=str(folder), draft=str(folder / "draft"), device="cpu", max_num_seqs=16)
    placement = place(settings)
    plan = memory_plan(settings, Checkpoints.open(settings, placement), placement)
    kv_bytes = plan.target_kv_bytes + plan.draft_kv_bytes
    assert plan.num_target_blocks == plan.num_draft_blocks
    assert 0 <= GIB // 4 - kv_bytes < kv_bytes // plan.num_target_blocks
