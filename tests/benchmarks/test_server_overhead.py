"""A round through the server split by cause, over made-up metrics and loads."""

import io
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import server_overhead
from kimi_client import Completion
from kimi_client.load import LoadResult, RequestTimes
from paced_runners import write_model

SERVER: Any = SimpleNamespace(ports=SimpleNamespace(grpc=1, metrics=2))
METRICS = """# HELP kimi_steps_total Steps.
kimi_steps_total{model="m",version="1"} 10
kimi_step_seconds_total{model="m",phase="target"} 0.5
kimi_step_seconds_total{model="m",phase="draft"} 0.25
kimi_runner_seconds_total{model="m",runner="draft"} 0.125
other_total{model="m"} 3
"""


def completion(num_tokens: int, steps: int | None) -> Completion:
    speculation = None if steps is None else {"num_spec_steps": steps, "mean_acceptance_length": 2.5}
    statistics = {"num_output_tokens": num_tokens, "speculative_decoding": speculation}
    return Completion(
        text="",
        finish_reason="length",
        stop_reason=None,
        num_output_tokens=num_tokens,
        token_ids=(),
        logprobs=(),
        statistics=statistics,
    )


def test_counters_are_read_by_their_own_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: io.BytesIO(METRICS.encode()))
    found = server_overhead.scrape(1)
    assert found == {
        "kimi_steps_total": 10,
        "kimi_step_seconds_total target": 0.5,
        "kimi_step_seconds_total draft": 0.25,
        "kimi_runner_seconds_total draft": 0.125,
    }
    assert server_overhead.split_by(found, "kimi_step_seconds_total") == {"target": 50.0, "draft": 25.0}


def test_a_served_round_split_by_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"kimi_steps_total": 5.0, "kimi_step_seconds_total target": 1.0}
    seconds = {"target": 0.5, "draft": 0.3, "schedule": 0.02, "commit": 0.03, "publish": 0.05}
    after = {"kimi_steps_total": 15.0} | {f"kimi_step_seconds_total {name}": s for name, s in seconds.items()}
    after["kimi_step_seconds_total target"] += 1.0
    after |= {"kimi_runner_seconds_total target": 0.4, "kimi_runner_seconds_total draft": 0.1}
    scrapes, loads = iter([before, after]), []
    times = RequestTimes((1.0, 2.0, 3.0), completion(9, 2)), RequestTimes((1.0, 3.0, 4.0, 5.0), completion(9, 4))

    async def run_load(url: str, requests: list[dict[str, Any]], count: int) -> LoadResult:
        loads.append((url, requests, count))
        return LoadResult(count, 2.0, times)

    monkeypatch.setattr(server_overhead, "run_load", run_load)
    monkeypatch.setattr(server_overhead, "METRICS_SETTLE_S", 0)
    monkeypatch.setattr(server_overhead, "scrape", lambda port: next(scrapes))
    row = server_overhead.served(SERVER, 2, 3, 9, True)
    assert row == pytest.approx(
        {
            "rounds": 10,
            "round_ms": 90,
            "target_runner_ms": 40,
            "draft_runner_ms": 10,
            "target_way_ms": 10,
            "draft_way_ms": 20,
            "schedule_ms": 2,
            "commit_ms": 3,
            "publish_ms": 5,
            "server_ms": 40,
            "round_at_client_ms": 1000,
            "responses_per_step": 0.8,
            "acceptance_length": 2.5,
            "output_tokens_per_second": 9,
        }
    )
    assert len(loads) == 2
    assert loads[0] == loads[1]
    url, requests, count = loads[0]
    assert (url, count, [request["seed"] for request in requests]) == ("localhost:1", 2, [0, 1])
    fields = {"stream": True, "max_tokens": 9, "ignore_eos": True, "num_speculative_tokens": 3}
    assert requests[0].items() >= fields.items()


def test_rounds_of_a_request_with_drafts_and_without() -> None:
    assert server_overhead.num_rounds(completion(9, 4)) == 4
    assert server_overhead.num_rounds(completion(9, None)) == 8


def options(**changed: Any) -> Namespace:
    given = {"checkpoint": Path("/c"), "draft": None, "device": "cpu", "kernels": "auto", "streams": [1, 4], "k": 3}
    given |= {"set": ["log_level=DEBUG"], "rounds": 7, "output_tokens": 5, "no_stream": False, "paced": None}
    return Namespace(**given | changed)


def test_the_servers_settings() -> None:
    settings = server_overhead.settings_of(options(), "tensor")
    assert (settings.checkpoint, settings.draft, settings.aux_transfer) == ("/c", "/c/draft", "tensor")
    assert (settings.max_num_seqs, settings.max_model_len, settings.kv_tokens) == (4, 512, 2048)
    assert (settings.max_speculative_tokens, settings.num_speculative_tokens) == (3, 3)
    assert (settings.speculation_policy, settings.log_level) == ("fixed", "DEBUG")
    plain = server_overhead.settings_of(options(k=0, draft=Path("/d")), "auto")
    assert (plain.draft, plain.max_speculative_tokens, plain.num_speculative_tokens) == ("/d", 1, 0)


class BareLoop:
    """A client of a bare loop, whose rounds take as long as told."""

    def __init__(self, url: str) -> None:
        self.inputs: dict[str, Any] = {}

    def infer(self, model: str, inputs: list[Any]) -> Any:
        self.inputs = {tensor.name(): tensor for tensor in inputs}
        found = {"SECONDS": np.array([0.003, 0.001, 0.002]), "RUNNER_SECONDS": np.array([0.001, 0.0, 0.0015])}
        return SimpleNamespace(as_numpy=found.__getitem__)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("k", "allowed"), [(3, 4.4), (0, 2.4)])
def test_a_row_allows_as_many_calls_as_a_round_has(k: int, allowed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_overhead, "served", lambda *given: {"served": given[1:]})
    monkeypatch.setattr(server_overhead.grpcclient, "InferenceServerClient", BareLoop)
    row = server_overhead._row(options(k=k), SERVER, 2, False)
    assert (row["streams"], row["served"], row["call_ms"]) == (2, (2, k, 5, True), pytest.approx(2.0))
    assert row["allowed_ms"] == pytest.approx(allowed)
    bare = [row["bare_round_ms"], row["bare_ways_ms"]]
    assert bare == pytest.approx([2.0, 1.0] if k else [float("nan")] * 2, nan_ok=True)


def test_what_the_bare_loop_is_asked() -> None:
    client: Any = BareLoop("")
    server_overhead.median_ms(client, {"TARGET_PLAN": np.zeros(3, np.uint8)}, 7, True)
    asked = {name: (tensor.datatype(), tensor.shape()) for name, tensor in client.inputs.items()}
    assert asked == {"TARGET_PLAN": ("UINT8", [3]), "ROUNDS": ("INT32", [1]), "TAKES_TENSOR": ("BOOL", [1])}


def test_what_a_round_takes_beyond_one_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def rounds_in_process(*given: Any) -> dict[int, float]:
        asked.append(given[1:3])
        return {1: 2.0, 4: 3.0}

    monkeypatch.setattr(server_overhead, "rounds_in_process", rounds_in_process)
    rows = [{"streams": 1, "round_ms": 5.0}, {"streams": 4, "round_ms": 5.0}]
    settings: Any = None
    server_overhead.add_in_process(options(), settings, rows)
    assert [(row["in_process_round_ms"], row["beyond_ms"]) for row in rows] == [(2.0, 3.0), (3.0, 2.0)]
    assert asked == [([1, 4], {"max_tokens": 5, "ignore_eos": True, "num_speculative_tokens": 3})]


def test_rows_are_printed_under_their_columns(capsys: pytest.CaptureFixture[str]) -> None:
    names = "aux streams call_ms bare_round_ms bare_ways_ms round_ms target_runner_ms draft_runner_ms target_way_ms"
    names += " draft_way_ms schedule_ms commit_ms publish_ms server_ms allowed_ms round_at_client_ms"
    row = {name: place / 8 for place, name in enumerate([*names.split(), "output_tokens_per_second"])}
    server_overhead.print_rows([row | {"aux": "ipc", "streams": 4}])
    server_overhead.print_rows([row | {"aux": "ipc", "streams": 4, "in_process_round_ms": 9.0, "beyond_ms": 1.0}])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("ipc | 4 | 0.250 | 0.375 | ")
    assert lines[2].endswith(" | output_tokens_per_second | in_process_round | beyond")
    assert lines[3].endswith(" | 2.000 | 9.000 | 1.000")
    assert {line.count(" | ") for line in lines} == {16, 18}


def test_paced_models_take_the_runners_places(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 640}}))
    for model in server_overhead.RUNNERS:
        (tmp_path / model).symlink_to(tmp_path)
    server_overhead.put_paced_runners(tmp_path, options(checkpoint=tmp_path, paced=[8.0, 2.0]))
    for model, made in (("kimi_target", "'target', 0.008, 640"), ("eagle3_draft", "'draft', 0.002, 640")):
        assert f"make_server(args, {made})" in (tmp_path / model / "1/model.py").read_text()
        assert (tmp_path / model / "config.pbtxt").resolve().parent.name == model
    write_model(tmp_path / "one", tmp_path / "config.json", "draft", 1.5, 3)
    compile((tmp_path / "one/1/model.py").read_text(), "model.py", "exec")
