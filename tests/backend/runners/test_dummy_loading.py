"""`load_format = dummy`, `routing = uniform`, `synthetic_acceptance`: no weights are read, and every output says so."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from kimi_backend.checkpoint.loading import DraftCheckpoint, TargetCheckpoint
from kimi_backend.checkpoint.presets import Architecture, DraftKind, Preset
from kimi_backend.cli.make_checkpoint import make_checkpoint
from kimi_backend.config.quantization_config import QuantizationMethod
from kimi_backend.config.settings import ServingSettings
from kimi_backend.engine.engine import Engine
from kimi_backend.errors import CheckpointError, ConfigError
from kimi_backend.runners.load.loading import load_draft_runner, load_pair, load_target_runner
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.serving.descriptions import description_from_json, description_to_json
from kimi_backend.serving.responses import statistics_json
from kimi_backend.types.request import GenerateRequest, SamplingParams
from support.engine_runs import generate
from support.recording_client import RecordingClient
from support.waiting import PATIENCE_S

CPU = torch.device("cpu")
SYNTHETIC_PARTS = ("weights dummy", "routing uniform", "acceptance length synthetic 2.5")


def make(folder: Path, draft: DraftKind = DraftKind.MLA, quantization: QuantizationMethod = QuantizationMethod.INT4,
         *, has_weights: bool = False) -> Path:  # fmt: skip
    make_checkpoint(
        folder,
        preset=Preset.TINY,
        num_layers=3,
        quantization=quantization,
        draft=draft,
        architecture=Architecture.KIMI_K25,
        has_weights=has_weights,
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("dummy") / "tiny")


def settings(folder: Path, **changes: object) -> ServingSettings:
    values: dict[str, object] = {
        "checkpoint": str(folder),
        "draft": str(folder / "draft"),
        "load_format": "dummy",
        "routing": "uniform",
        "synthetic_acceptance": 2.5,
        "max_model_len": 256,
        "kv_tokens": 2048,
        "max_num_seqs": 8,
        "device": "cpu",
    }
    return ServingSettings(**(values | changes))  # type: ignore[arg-type]


def request(index: int, k: int = 3, num_tokens: int = 40) -> GenerateRequest:
    prompt = np.random.default_rng(index).integers(0, 2048, 20)
    return GenerateRequest(
        request_id=str(index),
        prompt_token_ids=tuple(prompt.tolist()),
        sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, seed=index),
        num_speculative_tokens=k,
    )


def test_a_folder_of_configs_serves_and_says_what_is_not_real(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not list(folder.rglob("*.safetensors"))
    with caplog.at_level(logging.WARNING, "kimi_backend.runners"):
        target, draft = load_pair(settings(folder))
    assert [p for p in SYNTHETIC_PARTS if any(p in record.getMessage() for record in caplog.records)] == list(
        SYNTHETIC_PARTS
    )
    assert draft is not None
    for runner in (target, draft):
        description = runner.describe()
        assert description.synthetic_parts == SYNTHETIC_PARTS
        assert description_from_json(description_to_json(description)[0]) == description
    engine = Engine(target, draft, settings=SchedulerSettings(max_num_seqs=8, max_num_batched_tokens=256))
    engine.start()
    try:
        engine.wait_until_ready(PATIENCE_S)
        clients = [RecordingClient() for _ in range(8)]
        for index, client in enumerate(clients):
            engine.submit(request(index), client)
        finals = [client.wait() for client in clients]
        assert engine.statistics().synthetic_parts == SYNTHETIC_PARTS
    finally:
        engine.stop()
    lengths = []
    for final in finals:
        stats = final.stats
        assert stats is not None and stats.synthetic_parts == SYNTHETIC_PARTS
        assert statistics_json(stats)["pretences"] == SYNTHETIC_PARTS
        assert stats.speculation is not None
        lengths.append(stats.speculation.mean_acceptance_length)
    assert np.mean(lengths) == pytest.approx(2.5, abs=0.35)


def test_without_synthetic_parts_nothing_is_said(folder: Path) -> None:
    assert settings(folder, load_format="safetensors", routing="model", synthetic_acceptance=0.0).synthetic_parts == ()
    target, _ = load_pair(settings(folder, draft="", routing="model", synthetic_acceptance=0.0))
    assert target.describe().synthetic_parts == ("weights dummy",)


def test_dummy_weights_are_those_that_make_checkpoint_writes(tmp_path: Path) -> None:
    """The two have the same seeds on a CPU, so that a dummy run can be repeated from files."""
    written = make(tmp_path / "written", DraftKind.MHA, has_weights=True)
    target, dummy = TargetCheckpoint.open(written), TargetCheckpoint.dummy(written, CPU)
    assert dummy.num_bytes == sum(
        target.tensors.read(name).nbytes for name in dummy.tensors.names() & target.tensors.names()
    )
    for name in sorted(target.tensors.names())[::37]:
        assert torch.equal(target.tensors.read(name), dummy.tensors.read(name)), name
    draft = DraftCheckpoint.open(written / "draft", target.config)
    made = DraftCheckpoint.dummy(written / "draft", target.config, CPU)
    assert "d2t" in made.tensors.names(), "a reduced head needs its map"
    for name in made.tensors.names():
        assert torch.equal(draft.tensors.read(name), made.tensors.read(name)), name


def test_a_dummy_draft_of_the_full_vocabulary_shares_the_targets_matrices(folder: Path) -> None:
    config = TargetCheckpoint.dummy(folder, CPU).config
    names = DraftCheckpoint.dummy(folder / "draft", config, CPU).tensors.names()
    assert not names & {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}


@pytest.mark.parametrize("quantization", list(QuantizationMethod))
def test_both_processes_make_the_same_weights(tmp_path: Path, quantization: QuantizationMethod) -> None:
    """A pair in one process and two runners loaded apart emit the same tokens, in every format."""
    one = settings(make(tmp_path / "tiny", quantization=quantization), synthetic_acceptance=0.0)
    limits = SchedulerSettings(max_num_seqs=8, max_num_batched_tokens=256)
    requests = [request(index, num_tokens=8) for index in range(2)]
    pair = generate(*load_pair(one), requests, limits, set())
    apart = generate(load_target_runner(one), load_draft_runner(one), requests, limits, set())
    assert [outcome.token_ids for outcome in pair] == [outcome.token_ids for outcome in apart]
    assert [outcome.rounds for outcome in pair] == [outcome.rounds for outcome in apart]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        load_pair(settings(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"synthetic_acceptance": 0.5}, "0.5 given, 0 or at least 1"),
        ({"synthetic_acceptance": 8.5}, "8.5 given, at most 8"),
        ({"synthetic_chances": "0.5,1.5"}, "0.5,1.5' given, 0 to 1"),
        ({"synthetic_chances": "0.5,x"}, "'x' given, a number"),
        ({"capture_batch_sizes": "1,x"}, "'1,x' given, numbers from 1 up"),
        ({"load_format": "gguf"}, "'safetensors', 'dummy'"),
        ({"routing": "random"}, "'model', 'uniform'"),
    ],
)
def test_values_out_of_range_are_refused(folder: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_pair(settings(folder, **changes))
