"""Scripts that look at requests: the files that one goes through, and what bad ones are made of."""

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bad_requests
import trace_request
from trace_request import Trace

ROOT = Path(__file__).resolve().parents[2]


def frame(name: str, function: str = "f", back: Any = None) -> Any:
    path = f"/somewhere/backend/kimi_backend/{name}" if name[0] != "/" else name
    return SimpleNamespace(f_code=SimpleNamespace(co_filename=path, co_name=function), f_back=back)


def test_a_trace_goes_from_the_targets_call_to_the_first_attention_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = frame("engine/loop.py", back=frame("/usr/lib/threading.py"))
    core = frame("engine/core.py", back=loop)
    kernel = "/x/kernels/kimi_kernels/mla_decode/op.py"
    calls = [
        frame("engine/plan.py", back=core),
        frame("runners/target_runner.py", "describe", core),
        frame("runners/target_runner.py", "launch", core),
        frame("models/target.py"),
        frame(kernel, "prepare"),
        frame("models/target.py"),
        frame("layers/attention.py", "mla_decode"),
        frame(kernel, "mla_decode"),
        frame("models/later.py"),
    ]
    others, traced = Trace(), Trace()
    for call in calls:
        others(call, "call", None)
    monkeypatch.setattr(threading.current_thread(), "name", "kimi-engine")
    for call in calls:
        traced(call, "call", None)
    traced(frame("models/returned.py"), "return", None)
    traced(frame("/usr/lib/json.py"), "call", None)
    package = "backend/kimi_backend/"
    assert traced.to_attention == [
        *(f"{package}{name}" for name in ("engine/loop.py", "engine/core.py", "runners/target_runner.py")),
        f"{package}models/target.py",
        "kernels/kimi_kernels/mla_decode/op.py",
        f"{package}layers/attention.py",
    ]
    assert others.to_attention == []
    assert traced.entered == others.entered
    assert f"{package}models/later.py" in traced.entered
    assert f"{package}models/returned.py" not in traced.entered


def test_a_request_is_traced_to_its_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["trace_request", "--tokens", "3", "--k", "1", "--list"])
    trace_request.main()
    whole, to_attention = capsys.readouterr().out.split(" files from the engine's thread")
    entered = set(whole.splitlines()[1:-1])
    listed = to_attention.splitlines()[1:]
    assert int(whole.split()[0]) == len(entered) > 40
    assert int(whole.split()[-1]) == len(listed) > 10
    assert listed[0].strip().startswith("backend/kimi_backend/engine/")
    assert listed[-1].strip().startswith("kernels/kimi_kernels/")
    for part in ("engine/loop.py", "runners/target_runner.py", "runners/draft_runner.py"):
        assert f"       backend/kimi_backend/{part}" in entered
    assert all((ROOT / name.strip()).is_file() for name in entered)


def test_fields_of_bad_requests() -> None:
    (tool,) = json.loads(bad_requests._tools(1000))
    assert tool["function"]["description"] == "word " * 200
    assert json.loads(bad_requests._bias(3)) == {"0": 1.5, "1": 1.5, "2": 1.5}
    chat = bad_requests._chat("a", "b", tools="t")
    assert [message["content"] for message in json.loads(chat["messages"])] == ["a", "b"]
    assert chat["tools"] == "t"


def test_the_longest_gap_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 1.5, 4.0, 4.25])
    monkeypatch.setattr(bad_requests, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    client: Any = SimpleNamespace(stream=lambda **_: range(4))
    assert bad_requests.longest_gap(client) == 2.5


def test_a_checkpoint_with_a_long_context_is_otherwise_the_same(tmp_path: Path) -> None:
    nano = ROOT / "demo/kimi-nano"
    folder = bad_requests.with_long_context(nano, tmp_path / "long")
    assert {path.name for path in folder.iterdir()} == {path.name for path in nano.iterdir()}
    text = json.loads((folder / "config.json").read_text())["text_config"]
    before = json.loads((nano / "config.json").read_text())["text_config"]
    changed = {name for name in before if before[name] != text[name]}
    assert changed == {"max_position_embeddings"}
    assert text["max_position_embeddings"] >= bad_requests.MAX_MODEL_LEN
    assert (folder / "model.safetensors").is_symlink()
