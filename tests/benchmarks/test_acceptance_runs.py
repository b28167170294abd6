"""Measurements of acceptance: results of a draft's variants and of a trained draft, made up; and sparse files."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import draft_acceptance
import loading
import real_acceptance
from draft_acceptance import Result, change
from kimi_backend.checkpoint.safetensors_source import SafetensorsSource
from kimi_backend.checkpoint.tensor_spec import TensorRole, TensorSpec
from kimi_backend.cli.bench_in_process import BenchLoad
from kimi_backend.config.settings import ServingSettings


def report(token_ids: list[list[int]], accepted: list[int]) -> dict[str, Any]:
    """Two rounds a request."""
    requests = [
        {
            "error": None,
            "token_ids": ids,
            "statistics": {"speculative_decoding": {"num_accepted_draft_tokens": count, "num_spec_steps": 2}},
        }
        for ids, count in zip(token_ids, accepted, strict=True)
    ]
    mean = 1 + sum(accepted) / (2 * len(accepted))
    return {"requests": requests, "acceptance_length": mean, "acceptance_per_position": [0.5, None]}


def test_a_variants_result_and_its_change() -> None:
    made = report([[1], [2]], [4, 2])
    whole = draft_acceptance.result_of("as it is", 1.0, made, [[1], [2]], [[1], [2]])
    assert (whole.lengths, whole.per_position, whole.num_equal_texts) == ((3.0, 2.0), (0.5, 0.0), 2)
    less = draft_acceptance.result_of("fp8", 1.0, report([[1], [3]], [2, 1]), [[1], [3]], [[1], [2]])
    assert (less.acceptance_length, less.lengths, less.num_equal_texts) == (1.75, (2.0, 1.5), 1)
    assert change(less, whole) == "-30.0 ± 10.0 %"
    assert " ".join(str(less).split()) == "fp8 1 1.750 ± 0.250 50% 0% 1 of 2"
    with pytest.raises(SystemExit, match="1 requests failed, the first with: full"):
        draft_acceptance.texts({"requests": [{"error": None}, {"error": "full"}]})


@pytest.mark.parametrize(("written", "status"), [([[1], [2]], 0), ([[1], [3]], 1)])
def test_variants_run_over_held_out_prompts(
    written: list[list[int]], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [{"token_ids": [index]} for index in range(3)]
    (tmp_path / "held_out.json").write_text(json.dumps({"prompts": prompts}))
    ran: list[tuple[str, float, int]] = []

    def run_bench(settings: ServingSettings, file: Path, load: BenchLoad) -> dict[str, Any]:
        assert [json.loads(line)["input_ids"] for line in file.read_text().splitlines()] == [[0], [1]]
        assert (load.sampling.max_tokens, load.sampling.ignore_eos) == (7, True)
        k = load.num_speculative_tokens or 0
        ran.append((settings.draft_quantization, load.sampling.temperature, k))
        return report(written if k else [[1], [2]], [4, 2])

    monkeypatch.setattr(draft_acceptance, "run_bench", run_bench)
    given = [str(tmp_path), "--num-prompts", "2", "--num-tokens", "7", "--out", str(tmp_path / "out")]
    given += ["--variant", "as it is", "--variant", "fp8", "--temperature", "0"]
    monkeypatch.setattr(sys, "argv", ["draft_acceptance", *given])
    assert draft_acceptance.main() == status
    default = ServingSettings().draft_quantization
    assert ran == [(default, 0.0, 0), (default, 0.0, 3), ("fp8", 0.0, 3)]
    found = json.loads((tmp_path / "out/draft_acceptance.json").read_text())
    assert [result["variant"] for result in found["results"]] == ["as it is", "fp8"]
    assert Result(**found["results"][0]).acceptance_length == 2.5


def options(**changed: Any) -> Namespace:
    given = {"checkpoint": Path("/c"), "draft": None, "streams": [1, 4], "k": [0, 3], "set": ["kernels=plain"]}
    given |= {"requests": 3, "num_tokens": 5, "token_ids": [(1, 2), (3,)]}
    return Namespace(**given | changed)


def test_a_trained_drafts_settings() -> None:
    settings = real_acceptance.settings_of(options(), 100)
    assert (settings.draft, settings.max_model_len, settings.max_num_seqs) == ("/c/draft", 100, 4)
    assert (settings.kv_tokens, settings.max_speculative_tokens, settings.kernels) == (800, 3, "plain")
    assert (settings.speculation_policy, settings.draft) == ("fixed", "/c/draft")
    assert real_acceptance.settings_of(options(draft=Path("/d")), 100).draft == "/d"


@pytest.mark.parametrize(("streams", "count"), [(2, 3), (4, 4)])
def test_a_trained_drafts_second_run_counts(streams: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[list[dict[str, Any]]] = []
    errors: list[str] = []

    async def run_load(url: str, requests: list[dict[str, Any]], at_once: int) -> Any:
        assert (url, at_once) == ("localhost:1", streams)
        loads.append(requests)
        rate = 10.0 if len(loads) == 1 else 50.0
        summary = {"speculation": {"acceptance_length": 2}}
        return SimpleNamespace(
            errors=errors, requests=["a", "b"], output_tokens_per_second=rate, summary=lambda: summary
        )

    monkeypatch.setattr(real_acceptance, "run_load", run_load)
    monkeypatch.setattr(real_acceptance, "rounds_ms", lambda request: [1.0, 2.0] if request == "a" else [6.0])
    served: Any = SimpleNamespace(server=SimpleNamespace(ports=SimpleNamespace(grpc=1)))
    row = real_acceptance.measure(served, options(), streams, 0.5, 3)
    assert row == {
        "streams": streams,
        "temperature": 0.5,
        "k": 3,
        "requests": count,
        "round_ms": 2.0,
        "tokens_per_s": 50.0,
        "tokens_per_s_of_a_stream": 50.0 / streams,
        "speculation": {"acceptance_length": 2},
    }
    assert [len(requests) for requests in loads] == [streams, count]
    assert [request["input_ids"] for request in loads[1]][:3] == [[1, 2], [3], [1, 2]]
    fields = {"max_tokens": 5, "temperature": 0.5, "seed": 1, "num_speculative_tokens": 3, "ignore_eos": True}
    assert loads[1][1].items() >= fields.items()
    errors.append("full")
    with pytest.raises(RuntimeError, match=r"1 of \d requests failed: full"):
        real_acceptance.measure(served, options(), streams, 0.5, 3)


def test_the_first_k_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["real", "--checkpoint", "c", "--prompts", "p", "--k"]
    monkeypatch.setattr(sys, "argv", [*given, "0", "2"])
    assert real_acceptance.parse_arguments().k == [0, 2]
    monkeypatch.setattr(sys, "argv", [*given, "2", "0"])
    with pytest.raises(SystemExit):
        real_acceptance.parse_arguments()


def test_sparse_files_hold_what_is_declared_and_are_read_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "SHARD_BYTES", 24)
    specs = {
        "a.weight": TensorSpec(shape=(2, 4), dtypes=(torch.bfloat16,), role=TensorRole.NORM),
        "b.weight": TensorSpec(shape=(2,), dtypes=(torch.float32,), role=TensorRole.NORM),
        "c.weight": TensorSpec(shape=(3,), dtypes=(torch.int32,), role=TensorRole.NORM),
    }
    order = loading.write_sparse(tmp_path, specs)
    assert order == ["b.weight", "a.weight", "c.weight"]
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == ["model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"]
    source = loading.Watched(SafetensorsSource.open(tmp_path), {name: place for place, name in enumerate(order)})
    assert source.read("b.weight").shape == (2,)
    assert source.read("a.weight").dtype == torch.bfloat16
    assert source.read("b.weight").sum() == 0
    assert (source.num_bytes, source.num_reads, source.num_forward) == (8 + 16 + 8, 3, 2)


def test_memory_is_told_in_gib() -> None:
    own, mapped = loading.memory_gib()
    assert 0.01 < own < 64
    assert 0.001 < mapped < 64
