"""Cheaper drafts through the engine: other rounds, the same text."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kimi_backend.checkpoint.presets import DraftKind
from kimi_backend.checkpoint.token_counts import TOKEN_COUNTS_FILE, TokenCounts
from kimi_backend.cli.bench_in_process import BenchLoad, run_bench
from kimi_backend.config.quantization_config import QuantizationMethod
from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ConfigError
from kimi_backend.runners.load.loading import load_draft_runner
from kimi_backend.types.request import SamplingParams
from support.checkpoint_folders import make_tiny

VOCAB_SIZE = 2048


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ServingSettings:
    folder = make_tiny(tmp_path_factory.mktemp("cheaper") / "tiny", QuantizationMethod.INT4, DraftKind.MLA)
    counted = {token: 1 + (token * 7919) % 5000 for token in range(VOCAB_SIZE)}
    TokenCounts.of(counted, VOCAB_SIZE).write(folder / "draft" / TOKEN_COUNTS_FILE)
    prompts = [json.dumps({"input_ids": [index, 5, 6, 7 + index]}) for index in range(4)]
    (folder / "prompts.jsonl").write_text("\n".join(prompts))
    return ServingSettings(
        checkpoint=str(folder), draft=str(folder / "draft"), max_model_len=64, device="cpu", speculation_policy="fixed"
    )


def bench(settings: ServingSettings, **changes: Any) -> dict[str, Any]:
    # A high temperature: with noise shared by target and draft, some drafts of random models are accepted.
    load = BenchLoad(
        sampling=SamplingParams(temperature=2.0, seed=3, max_tokens=24, ignore_eos=True),
        num_speculative_tokens=3,
    )
    chosen = dataclasses.replace(settings, **changes)
    return run_bench(chosen, Path(settings.checkpoint) / "prompts.jsonl", load)


def texts(report: dict[str, Any]) -> list[list[int]]:
    return [request["token_ids"] for request in report["requests"]]


def test_a_cheaper_draft_changes_rounds_and_no_token(settings: ServingSettings) -> None:
    whole = bench(settings)
    assert whole["acceptance_length"] > 1.02, "a run where nothing is accepted shows nothing"
    reports = [bench(settings, draft_quantization=name) for name in ("fp8", "int4")]
    reports.append(bench(settings, draft_vocab=512))
    reports.append(bench(settings, draft_quantization="fp8", draft_head_quantization="int4"))
    assert [texts(report) for report in reports] == [texts(whole)] * 4
    assert reports[1]["speculative_decoding"] != whole["speculative_decoding"]
    assert reports[2]["acceptance_length"] < whole["acceptance_length"]


def test_a_vocabulary_that_holds_all_tokens_changes_no_round(settings: ServingSettings) -> None:
    whole, reduced = bench(settings), bench(settings, draft_vocab=VOCAB_SIZE)
    assert texts(reduced) == texts(whole)
    assert reduced["speculative_decoding"] == whole["speculative_decoding"]


def test_a_draft_alone_describes_what_it_keeps(settings: ServingSettings) -> None:
    chosen = dataclasses.replace(settings, draft_vocab=512, draft_quantization="int4")
    assert load_draft_runner(chosen).describe().draft_vocab_size == 512


def test_counts_may_stand_elsewhere(settings: ServingSettings, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no token counts at .*other\.json; `kimi count-tokens` writes them"):
        load_draft_runner(dataclasses.replace(settings, draft_vocab=8, draft_vocab_counts=str(tmp_path / "other.json")))
    TokenCounts.of({1: 1}, VOCAB_SIZE).write(tmp_path / "other.json")
    chosen = dataclasses.replace(settings, draft_vocab=8, draft_vocab_counts=str(tmp_path / "other.json"))
    assert load_draft_runner(chosen).describe().draft_vocab_size == 8


def test_dummy_weights_need_no_counts(settings: ServingSettings, tmp_path: Path) -> None:
    dummy = dataclasses.replace(settings, load_format="dummy", draft_vocab=16)
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text((Path(settings.draft) / "config.json").read_text())
    assert load_draft_runner(dataclasses.replace(dummy, draft=str(folder))).describe().draft_vocab_size == 16
