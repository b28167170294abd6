"""The command that `kimi bench` runs Triton's perf_analyzer by."""

import json
from pathlib import Path

import pytest

from kimi_backend.cli import perf_analyzer
from kimi_backend.cli.perf_analyzer import find_perf_analyzer, input_data, run_perf_analyzer
from kimi_backend.errors import KimiError


def test_the_models_version_is_told_and_a_failure_is_quoted(tmp_path: Path) -> None:
    """Looking for a version fails by chance: see `run_perf_analyzer`."""
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho "given: $*"\nexit 3\n')
    program.chmod(0o755)
    told = r"code 3: given: -m spec_ensemble -x 1 .*--concurrency-range=2 --request-count=1"
    with pytest.raises(KimiError, match=told):
        run_perf_analyzer(str(program), "localhost:1", [{"text_input": "def f"}], concurrency=2)


def test_requests_become_its_steps() -> None:
    messages = [{"role": "user", "content": "hi"}]
    data = input_data([{"messages": messages, "max_tokens": 4}, {"stop": ["a", "b"], "logit_bias": {"5": 1.0}}])
    assert data == {
        "data": [
            {"messages": ['[{"role": "user", "content": "hi"}]'], "max_tokens": [4], "stream": [True]},
            {"stop": {"content": ["a", "b"], "shape": [2]}, "logit_bias": ['{"5": 1.0}'], "stream": [True]},
        ]
    }
    assert input_data([{"stop": []}])["data"][0]["stop"] == {"content": [], "shape": [0]}


EXPORT = {
    "experiments": [
        {
            "requests": [
                {
                    "timestamp": 2_000_000_000,
                    "response_timestamps": [2_250_000_000, 3_000_000_000],
                    "response_outputs": [
                        {"text_output": "a", "num_output_tokens": "1", "finish_reason": ""},
                        {
                            "text_output": "b",
                            "num_output_tokens": 2,
                            "finish_reason": "stop",
                            "stop_reason": "x",
                            "statistics": '{"seed": 3}',
                        },
                    ],
                },
                {"timestamp": 1_000_000_000, "response_timestamps": [5_000_000_000], "response_outputs": [{}]},
            ]
        }
    ]
}


def test_an_export_is_read_as_our_own_loads_are(tmp_path: Path) -> None:
    program = tmp_path / "program"
    (tmp_path / "export.json").write_text(json.dumps(EXPORT))
    copy = f'for a; do case $a in --profile-export-file=*) cp {tmp_path}/export.json "${{a#*=}}";; esac; done'
    program.write_text(f"#!/bin/sh\n{copy}\n")
    program.chmod(0o755)
    result = run_perf_analyzer(str(program), "localhost:1", [{"text_input": "def f"}], concurrency=2)
    first, second = result.requests
    assert (result.concurrency, result.wall_s, result.errors) == (2, pytest.approx(4.0), ())
    assert (first.first_token_s, first.total_s) == (pytest.approx(0.25), pytest.approx(1.0))
    assert second.total_s == pytest.approx(4.0)
    done = first.completion
    assert (done.text, done.num_output_tokens, done.finish_reason, done.stop_reason) == ("ab", 3, "stop", "x")
    assert done.statistics == {"seed": 3}
    assert (second.completion.text, second.completion.num_output_tokens) == ("", 0)


def test_a_run_that_leaves_no_export_has_failed(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    with pytest.raises(KimiError, match="perf_analyzer failed with code 0"):
        run_perf_analyzer(str(program), "localhost:1", [{}], concurrency=1)


def test_it_is_found_on_the_path_or_beside_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {None: None, str(tmp_path): "/beside"}
    monkeypatch.setattr(perf_analyzer.shutil, "which", lambda name, path=None: found[path])
    monkeypatch.setattr(perf_analyzer.sys, "executable", str(tmp_path / "python"))
    assert find_perf_analyzer() == "/beside"
    found[None] = "/on/the/path"
    assert find_perf_analyzer() == "/on/the/path"
