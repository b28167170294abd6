"""The settings that measurements start their servers with, the commands that they keep, and tables of made-up cases."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import cpu_speed
import serving
import speculation_policy
from kimi_nano.corpus import SourceFile
from lookup_suite.loads import _edits, _records, longest_repeated, make_loads
from serving_suite.side_by_side import NANO
from several_gpus_suite import memory
from several_gpus_suite.verdict import Verdict
from slice_suite import tables


def test_servers_that_are_compared_differ_in_what_is_compared() -> None:
    args = Namespace(checkpoint="/c", draft="/d", cpu_threads=2)
    speeds = cpu_speed.server_settings(args)
    assert {name: (s.draft, s.speculation_policy) for name, s in speeds.items()} == {
        "plain": ("", "adaptive"),
        "fixed": ("/d", "fixed"),
        "default": ("/d", "adaptive"),
    }
    assert {(s.checkpoint, s.device, s.cpu_threads, s.max_model_len) for s in speeds.values()} == {
        ("/c", "cpu", 2, 1024)
    }
    policies = speculation_policy.server_settings(args)
    assert {name: (s.draft, s.speculation_policy) for name, s in policies.items()} == {
        "plain": ("", "fixed"),
        "fixed": ("/d", "fixed"),
        "adaptive": ("/d", "adaptive"),
    }
    assert {(s.device, s.max_model_len, s.max_num_seqs) for s in policies.values()} == {("cpu", 1024, 32)}


def test_the_kept_command_has_no_paths_and_gives_the_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [
        "rate",
        "--checkpoint",
        "/a/b",
        "-k",
        "2",
        "--rates",
        "1,2.5",
        "--note",
        "mine",
        "--prefix-characters",
        "9",
    ]
    options = serving.parse_arguments(given)
    command = serving.command_line(options)
    assert command.startswith("python benchmarks/serving.py rate --checkpoint PATH -k 2 ")
    assert " --rates 1,2.5 " in command
    assert "--prefix-characters 9" in command
    assert not {"--note", "--out", "--draft", "--url"} & set(command.split())
    loads = serving.load_settings(options)
    assert (loads.num_speculative_tokens, loads.rates, loads.prefix_characters) == (2, (1, 2.5), 9)
    assert loads.max_tokens == serving.LoadSettings().max_tokens
    monkeypatch.setenv("KIMI_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("KIMI_CHECKPOINT", "/a/b")
    monkeypatch.setenv("KIMI_NO_SETTING", "7")
    assert serving.settings_given()["max_num_seqs"] == "7"
    assert not {"checkpoint", "no_setting"} & set(serving.settings_given())


@pytest.mark.parametrize("starts", [True, False])
def test_a_server_of_its_own_is_stopped(starts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def ready() -> None:
        if not starts:
            raise TimeoutError
        done.append("ready")

    ports = SimpleNamespace(grpc=5)
    server = SimpleNamespace(
        start=lambda: done.append("start"), wait_until_ready=ready, stop=lambda: done.append("stop"), ports=ports
    )
    monkeypatch.setattr(serving, "make_server", lambda settings, log_file: server)
    options = serving.parse_arguments(["rate", "--checkpoint", str(NANO)])
    if starts:
        with serving.served(options) as url:
            assert (url, done) == ("localhost:5", ["start", "ready"])
    else:
        with pytest.raises(TimeoutError), serving.served(options):
            pass
    assert done[-1] == "stop"
    options.url = "there:1"
    with serving.served(options) as url:
        assert url == "there:1"


CASE: dict[str, Any] = {
    "num_layers": 4,
    "num_speculative_tokens": 3,
    "prompt_len": 1024,
    "batch_size": 8,
    "draft": "bf16",
    "preset": "tiny",
}
TIMES = {"round_ms": 9.0, "target_ms": 6.0, "draft_ms": 2.0, "host_ms": 1.0, "floor_ms": 4.5, "of_floor": 2.0}


def test_the_table_of_rounds() -> None:
    bare = CASE | {name: TIMES[name] for name in ("round_ms", "target_ms", "draft_ms", "host_ms")}
    cases = [CASE | TIMES | {"decode_tokens_per_s": 1234.4, "lockstep_round_ms": 10.0}, CASE]
    lines = tables.rounds_table([*cases, bare | {"draft": "", "decode_tokens_per_s": 1}]).splitlines()
    assert lines[2].startswith("| bf16 | 4 | 3 | 8 x 1k | 9.00 | 10.00 | 6.00 | 2.00 | 1.00 | 4.50 | 2.00 | 1,234 | ")
    assert lines[3].startswith("| - | 4 | 3 | 8 x 1k | 9.00 | 9.00 | 6.00 | 2.00 | 1.00 | 0.00 | 0.00 | 1 | ")
    assert len(lines) == 4


def test_the_table_of_kernels_begins_with_what_takes_longest() -> None:
    gpu = {"covered_us": 5000.0, "busy_us": 4000.0, "num_kernels": 70.0}
    cases = [
        CASE | {"gpu": gpu | {"by_kind": {"moe": 10.0, "attention": 30.0}}},
        CASE,
        CASE | {"gpu": gpu | {"by_kind": {"moe": 25.0}}},
    ]
    lines = tables.gpu_table(cases).splitlines()
    assert lines[0].endswith(" | kernels | moe | attention |")
    assert lines[1].count("---") == 9
    assert lines[2] == "| bf16 | 4 | 3 | 8 x 1k | 5,000 | 4,000 | 70 | 10 | 30 |"
    assert lines[3].endswith(" | 25 | 0 |")


def test_the_first_case_of_a_shape_and_draft_counts(tmp_path: Path) -> None:
    shape = {name: value for name, value in CASE.items() if name != "draft"}
    run = {"device": "d", "ceilings": {"read_bytes_per_us": 3, "other": 4}, "cases": [shape | {"n": 1}]}
    plain = shape | {"num_speculative_tokens": 0, "n": 2}
    later = {"device": "e", "ceilings": None, "settings": {"draft_quantization": "fp8"}, "cases": [shape | {"n": 3}]}
    (tmp_path / "a.json").write_text(json.dumps(run))
    (tmp_path / "b.json").write_text(json.dumps({"runs": [run | {"cases": [shape | {"n": 9}, plain]}, later]}))
    found = tables.load_cases([tmp_path / "a.json", tmp_path / "b.json"])
    assert [(case["draft"], case["n"], case["device"]) for case in found] == [
        ("", 2, "d"),
        ("bf16", 1, "d"),
        ("fp8", 3, "e"),
    ]
    assert [case.get("read_bytes_per_us") for case in found] == [3, 3, None]
    assert all("other" not in case for case in found)


def test_memory_that_was_lent_is_held_against_the_plan() -> None:
    plan: Any = SimpleNamespace(total_bytes=2 * memory.GIB)
    found = []
    for lent in ([], [2 * memory.GIB, memory.GIB], [memory.GIB, 2 * memory.GIB + 1]):
        verdict = Verdict()
        memory._judge("tiny", plan, lent, verdict)
        found.append([holds for holds, _ in verdict.lines])
    assert found == [[True], [True, True], [True, False]]


def words(text: str) -> list[int]:
    return [hash(word) for word in text.split()]


def function(name: str, num_lines: int) -> str:
    return f"def {name}():\n" + "".join(f"    value_{i} = call({i}, a, b)\n" for i in range(num_lines))


def test_loads_of_edits_and_records() -> None:
    text = function("short", 6) + function("fits", 30) + function("long", 200)
    file = SourceFile("a.py", "", text)
    (edit,) = _edits(file, words)
    shown = "".join(function("fits", 30).splitlines(keepends=True)[:3])
    assert edit.token_ids[-len(words(shown)) :] == words(shown)
    assert edit.span == words(function("fits", 30)[len(shown) :])
    assert longest_repeated(edit.span, edit.token_ids) == len(edit.span)
    (records,) = _records(file, words)
    assert records.span == []
    assert len(records.token_ids) == 3 + 40 * 8
    assert list(_records(SourceFile("b.py", "", "x = 1\n"), words)) == []
    loads = make_loads([file] * 5, words, 3)
    assert (len(loads["edit"]), len(loads["records"])) == (3, 3)
