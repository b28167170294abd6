"""The command itself: quick to answer, one message for an error, exit code 2 for bad input."""

import dataclasses
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from kimi_backend.cli import main
from kimi_backend.cli.setting_options import NO_OPTIONS
from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import KimiError
from support.waiting import PATIENCE_S

HEAVY_MODULES = ("torch", "transformers", "safetensors", "numpy", "triton")


def run_kimi(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kimi_backend.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.parametrize("module", ["main", "serve"])
def test_neither_help_nor_what_checks_before_a_start_imports_anything_heavy(module: str) -> None:
    program = f"import sys, kimi_backend.cli.{module}; print([m for m in {HEAVY_MODULES} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


TORCHLESS = [
    ["--version"],
    ["generate", "hi", "--url=127.0.0.1:9"],
    ["bench", "--url=127.0.0.1:9"],
    ["health", "--url=127.0.0.1:9", "--no-draft"],
    ["serve"],
    ["openai", "--url=http://127.0.0.1:9"],
    ["make-checkpoint", "."],
    ["count-tokens", "/nowhere", "/nowhere", "--out=/nowhere/x"],
]


def test_commands_that_need_no_torch_import_none() -> None:
    """One after another in one process: the first that imports it is named."""
    program = (
        "import sys; from kimi_backend.cli.main import main\n"
        f"for arguments in {TORCHLESS}:\n"
        "    sys.argv = ['kimi', *arguments]\n"
        "    try: main()\n"
        "    except SystemExit as end: print(end.code, file=sys.stderr)\n"
        "    assert 'torch' not in sys.modules, arguments\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    codes = [line for line in done.stderr.splitlines() if line.isdecimal()]
    assert len(codes) == len(TORCHLESS)


def test_each_help_has_an_example_that_parses() -> None:
    group = typer.main.get_command(main.app)
    for name, (_, example) in main.COMMANDS.items():
        command = group.commands[name]  # type: ignore[attr-defined]
        kimi, given, *arguments = shlex.split(example)
        assert (kimi, given) == ("kimi", name)
        command.make_context(name, arguments, parent=group.make_context("kimi", [name, *arguments]))
        assert f"Example: {example}" in command.epilog


def test_version() -> None:
    assert run_kimi("--version").stdout == f"kimi {metadata.version('kimi-spec-serving')}\n"


def test_the_shell_completes_options() -> None:
    asked = {"_KIMI_COMPLETE": "complete_bash", "COMP_WORDS": "kimi inspect --dr", "COMP_CWORD": "2"}
    result = CliRunner().invoke(main.app, [], env=asked, prog_name="kimi")
    assert result.stdout.split() == ["--draft", "--draft-vocab", "--draft-quantization", "--draft-head-quantization"]


def test_help_lists_the_commands() -> None:
    done = run_kimi("--help")
    assert done.returncode == 0
    assert "inspect" in done.stdout
    assert "make-checkpoint" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect"], "Missing argument 'PATH'"),
        (["inspect", "/nowhere", "--tp", "0"], "setting tensor_parallel_size: 0 given, at least 1"),
        (["inspect", "/nowhere", "--gpu-memory", "many"], "'--gpu-memory'"),
        (["inspect", "/nowhere", "--gpu-memory", "inf"], "setting gpu_memory_gib: inf given, at most"),
        (["inspect", "/nowhere", "--gpu-memory", "1e300"], "setting gpu_memory_gib: 1e+300 given, at most"),
        (
            ["inspect", "/nowhere", "--kv-dtype", "int3"],
            "setting kv_cache_dtype: 'int3' given, one of 'auto'",
        ),
        (["make-checkpoint", "/nowhere", "--shard-gb", "inf"], "'--shard-gb'"),
        (["make-checkpoint", "/nowhere", "--shard-gb", "nan"], "'--shard-gb'"),
        (["make-checkpoint", "/nowhere", "--preset", "huge"], "'tiny', 'kimi-k2.5'"),
        (["make-checkpoint", "/nowhere", "--quantization", "int3"], "'none', 'int4', 'fp8'"),
        (["unknown"], "No such command 'unknown'"),
    ],
)
def test_wrong_arguments_exit_with_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kimi", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == main.EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_bad_checkpoint_exits_with_2(tmp_path: Path) -> None:
    done = run_kimi("inspect", str(tmp_path))
    assert done.returncode == main.EXIT_BAD_INPUT
    assert done.stdout == ""
    assert done.stderr.strip() == (
        f"error: {tmp_path}/config.json: no such file; expected a checkpoint folder or its config.json"
    )


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (KimiError("what is wrong"), "error: what is wrong\n"),
        (KimiError("tensor \x1b[2J\r\u202e:\n  - 模"), "error: tensor \\x1b[2J\\r\\u202e:\n  - 模\n"),
        (FileNotFoundError(2, "No such file or directory", "/x"), "error: /x: No such file or directory\n"),
        (OSError(28, "No space left on device"), "error: No space left on device\n"),
    ],
)
def test_errors_that_a_user_can_act_on_are_one_line(
    error: Exception, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(main, "app", fail)
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == main.EXIT_BAD_INPUT
    assert capsys.readouterr().err == shown


def test_our_own_mistakes_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(main, "app", fail)
    with pytest.raises(ZeroDivisionError):
        main.main()


def test_serves_options_are_settings_but_for_those_of_the_server() -> None:
    command = typer.main.get_command(main.app).commands["serve"]  # type: ignore[attr-defined]
    names = {parameter.name for parameter in command.params}
    settings = {field.name for field in dataclasses.fields(ServingSettings)}
    assert settings - names == NO_OPTIONS
    ports = {"http_port", "grpc_port", "metrics_port", "openai_port"}
    assert names - settings == ports | {"host", "model_repository", "log_file", "triton_args"}


def test_serve_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def record(settings: ServingSettings, **others: object) -> int:
        seen.update(others, settings=settings)
        return 7

    monkeypatch.setattr("kimi_backend.cli.serve.serve", record)
    arguments = ["-k", "5", "--max-num-seqs", "9", "-tp", "2", "--enforce-eager", "--no-async-scheduling"]
    monkeypatch.setattr("sys.argv", ["kimi", "serve", *arguments, "--http-port", "4711"])
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert (caught.value.code, seen["http_port"], seen["grpc_port"], seen["host"]) == (7, 4711, None, "127.0.0.1")
    settings = seen["settings"]
    assert (settings.num_speculative_tokens, settings.max_num_seqs, settings.tensor_parallel_size) == (5, 9, 2)
    assert (settings.enforce_eager, settings.async_scheduling, settings.draft_fc_norm) == ("true", "false", "")


def test_a_container_sets_the_endpoints_options_by_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setattr("kimi_openai.serve", lambda settings, **given: seen.update(given))
    values = {"ACCESS_LOG": "true", "LOG_FORMAT": "json", "OTLP_ENDPOINT": "http://collector:4318"}
    for name, value in values.items():
        monkeypatch.setenv(f"KIMI_OPENAI_{name}", value)
    monkeypatch.setattr("sys.argv", ["kimi", "openai"])
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 0
    assert (seen["logs_access"], seen["logs_json"], seen["otlp_endpoint"]) == (True, True, "http://collector:4318")


NUMBERS = {
    "make-checkpoint": {"layers": (None, 1, None), "seed": (0, 0, None), "shard_gb": (5.0, 1e-6, 1e6)},
    "openai": {"port": (9000, 0, 65_535)},
    "generate": {"max_tokens": (128, 1, None), "temperature": (None, 0, None), "seed": (None, 0, None)},
    "chat": {"max_tokens": (512, 1, None), "temperature": (None, 0, None), "seed": (None, 0, None)},
    "demo": {"max_tokens": (96, 1, None), "num_speculative_tokens": (3, 1, 7), "temperature": (0.6, 0, None)},
    "bench": {
        "num_speculative_tokens": (3, 0, 7),
        "max_tokens": (128, 1, None),
        "temperature": (1.0, 0, None),
        "seed": (None, 0, None),
        "num_requests": (None, 1, None),
        "concurrency": (16, 1, None),
        "repeats": (None, 1, None),
        "time_limit": (120.0, 0, None),
        "rate_scale": (1.0, 1e-6, None),
        "length_scale": (1.0, 1e-6, None),
        "trace_block": (512, 1, None),
        "first_token_limit_ms": (None, 0, None),
        "inter_token_limit_ms": (None, 0, None),
        "request_limit_ms": (None, 0, None),
    },
    "eval": {
        "shots": (5, 0, None),
        "limit": (None, 1, None),
        "num_speculative_tokens": (3, 0, 7),
        "max_tokens": (512, 1, None),
        "temperature": (0.0, 0, None),
        "seed": (0, 0, None),
        "concurrency": (16, 1, None),
    },
    "health": {"timeout_s": (15.0, 0.1, None)},
    "probe": {"num_tokens": (64, 8, None), "num_speculative_tokens": (3, 1, 7)},
}
"""Command -> option -> its default, least and largest number."""


def test_numbers_keep_to_what_a_command_can_do() -> None:
    group: Any = typer.main.get_command(main.app)
    found = {}
    for name, command in group.commands.items():
        bounded = [option for option in command.params if getattr(option, "min", None) is not None]
        found[name] = {option.name: (option.default, option.min, option.max) for option in bounded}
    assert {name: options for name, options in found.items() if options} == NUMBERS
