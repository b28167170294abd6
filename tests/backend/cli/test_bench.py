"""`kimi bench --in-process` on a tiny random checkpoint: the same text with and without speculation, and its report."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from typer.testing import CliRunner

from kimi_backend.cli import bench_in_process, bench_sweep, plots
from kimi_backend.cli.bench_in_process import BenchLoad
from kimi_backend.cli.bench_server import ServerLoad, write_plot
from kimi_backend.cli.main import app
from kimi_backend.cli.prompt_file import read_prompt_token_ids, read_prompts
from kimi_backend.engine.emitter import OutputTotals
from kimi_backend.engine.statistics import EngineState, take_statistics
from kimi_backend.errors import InvalidRequestError
from kimi_backend.text.sample_prompts import SAMPLE_PROMPTS
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_backend.types.request import SamplingParams, SpeculationStats
from support.printed_tables import rows_of

PROMPTS = '{"prompt": "def f(x):"}\n\n{"input_ids": [5, 6, 7, 8]}\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    result = CliRunner().invoke(app, ["make-checkpoint", str(folder / "tiny"), "--preset", "tiny", "--draft", "mla"])
    assert result.exit_code == 0, result.output
    (folder / "prompts.jsonl").write_text(PROMPTS)
    return folder


def bench(folder: Path, *options: str) -> dict[str, Any]:
    arguments = ["bench", "--in-process", "--checkpoint", str(folder / "tiny"), "--prompts"]
    arguments += [str(folder / "prompts.jsonl"), "--seed", "4", "--max-tokens", "12", "--max-model-len", "64", "--json"]
    result = CliRunner().invoke(app, [*arguments, *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_speculation_changes_speed_and_no_token(folder: Path) -> None:
    plain = bench(folder, "-k", "0")
    chosen = bench(folder, "-k", "3", "--draft", str(folder / "tiny" / "draft"), "--speculation-policy", "adaptive")
    fast = bench(
        folder,
        "-k",
        "3",
        "--draft",
        str(folder / "tiny" / "draft"),
        "--speculation-policy",
        "fixed",
    )
    for key in ("text", "token_ids", "finish_reason"):
        assert [r[key] for r in plain["requests"]] == [r[key] for r in fast["requests"]]
        assert [r[key] for r in plain["requests"]] == [r[key] for r in chosen["requests"]]
    assert plain["step_costs"] is fast["step_costs"] is None
    assert chosen["step_costs"]["target"]["step_ms"]["1"]["1"] > 0
    assert {choice["num_seqs"] for choice in chosen["step_costs"]["choices"]} == {1, 4, 16}
    assert [r["statistics"]["seed"] for r in fast["requests"]] == [4, 5]
    assert (plain["acceptance_length"], plain["acceptance_per_position"]) == (None, [])
    assert plain["requests"][0]["statistics"]["speculative_decoding"] is None
    rounds = [r["statistics"]["speculative_decoding"] for r in fast["requests"]]
    total = sum(r["num_spec_steps"] for r in rounds)
    assert fast["acceptance_length"] == 1 + sum(r["num_accepted_draft_tokens"] for r in rounds) / total
    assert len(fast["acceptance_per_position"]) == 3
    assert fast["num_output_tokens"] == sum(len(r["token_ids"]) for r in fast["requests"])
    assert set(fast["step_ms"]) == {"schedule", "target", "commit", "draft", "publish"}


def test_prompts_are_repeated_for_more_requests(folder: Path) -> None:
    report = bench(folder, "-k", "0", "--num-requests", "5", "--temperature", "0", "--ignore-eos")
    texts = [request["text"] for request in report["requests"]]
    assert texts == [texts[0], texts[1]] * 2 + [texts[0]]
    assert report["num_output_tokens"] == 60


ROUNDS = SpeculationStats(
    num_spec_steps=4,
    num_draft_tokens=10,
    num_accepted_draft_tokens=5,
    drafted_per_position=(4, 4, 2, 0),
    accepted_per_position=(3, 2, 0, 0),
)
REPLIES = [{"token_ids": [1, 2, 3], "error": None}, {"token_ids": [4], "error": "lost"}]


def report_of(totals: OutputTotals, **changes: Any) -> dict[str, Any]:
    statistics = replace(take_statistics(EngineState.READY, None, 0, None, totals), **changes)
    return bench_in_process._report(statistics, REPLIES, 2.0)


def test_a_report_in_process_and_its_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    totals = OutputTotals(
        speculation=ROUNDS, speculation_by_proposer={"eagle3": ROUNDS}, num_draft_tokens_histogram=(1, 0, 0, 3)
    )
    parts = ("acceptance length synthetic 3",)
    report = report_of(
        totals, num_steps=5, step_seconds={"draft": 0.01}, speculation_policy="fixed", synthetic_parts=parts
    )
    assert (report["num_output_tokens"], report["output_tokens_per_second"], report["wall_s"]) == (4, 2.0, 2.0)
    assert (report["acceptance_length"], report["acceptance_rate"], report["errors"]) == (2.25, 0.5, 1)
    assert (report["step_ms"], report["acceptance"], report["pretences"]) == ({"draft": 2.0}, parts[0], list(parts))
    assert report["speculation_by_proposer"]["eagle3"] == report["speculative_decoding"]
    bench_in_process.print_report(report | {"step_costs": None})
    text = capsys.readouterr().out
    rows = {name: cells[0] for name, cells in rows_of(text).items()}
    assert "length synthetic 3" in text and "steps, ms" not in text
    assert (rows["output_tokens_per_second"], rows["num_steps"], rows["errors"]) == ("2.0", "5", "1")
    assert rows["acceptance length (1 + accepted a round)"] == "2.250"
    assert rows["acceptance rate (accepted / drafted)"] == "0.500"
    assert [rows.get(f"accepted at position {n}") for n in (1, 2, 3, 4)] == ["0.750", "0.500", "0.000", None]
    assert rows["verifies with k = 0, 1, …"] == "25%, 0%, 0%, 75%"
    assert rows["mean step, draft (ms)"] == "2.000"


def test_a_report_in_process_without_speculation(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(OutputTotals(), step_seconds={"draft": 0.01})
    assert (report["acceptance_length"], report["acceptance_rate"], report["step_ms"]) == (None, None, {"draft": 10.0})
    bench_in_process.print_report(report | {"step_costs": None})
    assert "acceptance length" not in capsys.readouterr().out


def test_each_request_in_process_has_a_seed_of_its_own() -> None:
    load = BenchLoad(sampling=SamplingParams(seed=2**64 - 1), num_speculative_tokens=2)
    requests = [bench_in_process._request(index, (5,), load) for index in range(3)]
    assert [request.sampling.seed for request in requests] == [2**64 - 1, 0, 1]
    assert len({request.request_id for request in requests}) == 3
    unseeded = bench_in_process._request(1, (5,), replace(load, sampling=SamplingParams()))
    assert (unseeded.sampling.seed, unseeded.num_speculative_tokens) == (None, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--in-process"], "--checkpoint: not given"),
        (["--in-process", "--checkpoint", "x", "--compare-no-spec"], "go with a server"),
        (["--checkpoint", "x"], "go with --in-process"),
    ],
)
def test_options_that_do_not_go_together(folder: Path, options: list[str], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        CliRunner().invoke(app, ["bench", "--prompts", str(folder / "prompts.jsonl"), *options], catch_exceptions=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\nnonsense\n', r"wrong\.jsonl:2: not valid JSON"),
        ('{"text": "a"}\n', r"wrong\.jsonl:1: .* given, a JSON object with prompt"),
        ('{"prompt": 3}\n', r"wrong\.jsonl:1"),
        ('{"prompt": "a", "input_ids": [1]}\n', r"wrong\.jsonl:1"),
        ('{"input_ids": [true]}\n', r"wrong\.jsonl:1"),
        ("\n", "no prompts in it"),
        ("\udcff", "byte 0 is not UTF-8"),
    ],
)
@pytest.mark.parametrize("where", [["--in-process", "--checkpoint", "tiny"], ["--url=localhost:9"]])
def test_a_wrong_prompt_file_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, where: list[str], content: str, message: str
) -> None:
    path = folder / "wrong.jsonl"
    path.write_text(content, errors="surrogateescape")
    monkeypatch.chdir(folder)
    arguments = ["bench", *where, "--prompts", str(path)]
    with pytest.raises(InvalidRequestError, match=message):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_messages_go_to_a_server_only(folder: Path) -> None:
    path = folder / "chat.jsonl"
    path.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n')
    assert [list(prompt) for prompt in read_prompts(path)] == [["text_input"], ["messages"]]
    with pytest.raises(InvalidRequestError, match="prompt 2 has messages, which go to a server only"):
        read_prompt_token_ids(path, load_tokenizer(folder / "tiny"))


def test_without_a_file_there_are_prompts() -> None:
    assert read_prompts(None) == [{"text_input": prompt} for prompt in SAMPLE_PROMPTS]


@pytest.mark.parametrize(
    ("speculation", "heights"), [(None, []), ({"acceptance_per_position": [0.75, 0.5, None]}, [0.75, 0.5, 0])]
)
def test_a_plot_has_a_bar_a_draft_position(
    monkeypatch: pytest.MonkeyPatch, speculation: dict[str, Any] | None, heights: list[float]
) -> None:
    """The figure is replaced, as importing matplotlib takes longer than all of this file."""
    left, right = MagicMock(), MagicMock()
    figure = MagicMock()
    figure.subplots.return_value = left, right
    monkeypatch.setattr(plots, "new_figure", lambda **_: figure)
    run = {"first_token_ms": {"p50": 8.0}, "inter_token_ms": {"p50": 2.0}, "inter_chunk_ms": None}
    path = Path("plot.png")
    write_plot({"speculative": {**run, "speculation": speculation}}, path)
    (places, bars), _ = right.bar.call_args
    assert (list(places), bars) == (list(range(1, len(heights) + 1)), heights)
    assert left.bar.call_args.args[1] == [8.0, 2.0, 0]
    assert figure.savefig.call_args.args == (path,)


class LoadOf:
    """A runner of loads that keeps what it is asked for: more tokens a second with more streams, most with k = 2."""

    calls: list[tuple[Any, ...]]

    def __init__(self, load: Any, progress: Any, *, is_shown: bool) -> None:
        assert not is_shown
        self._cell = (load.fields["num_speculative_tokens"], load.concurrency, load.num_requests, load.fields["x"])
        self.load_generator = "a generator"

    def warm_up(self, name: str) -> None:
        self.calls.append(("warm up", name, *self._cell))

    def run(self, name: str) -> None:
        self.calls.append(("run", name, *self._cell[:2]))

    def summary(self, name: str) -> dict[str, Any]:
        k, streams, *_ = self._cell
        speed = streams * (10.0 - abs(k - 2))
        spread = [speed - 1, speed + 2]
        speculation = {"acceptance_length": 1.0 + k / 4} if k else None
        return {
            "acceptance": "exact",
            "output_tokens_per_second": speed,
            "output_tokens_per_second_range": spread,
            "speculation": speculation,
        }


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(LoadOf, "calls", [], raising=False)
    monkeypatch.setattr(bench_sweep, "LoadRunner", LoadOf)
    load = ServerLoad(url="url", prompts=[], fields={"x": 1}, num_requests=5, concurrency=9)
    return bench_sweep.sweep(load, [0, 2, 3], [1, 4], 2)


def test_a_sweep_runs_every_cell_as_often_as_asked(swept: dict[str, Any]) -> None:
    cells = [(k, streams) for streams in (1, 4) for k in (0, 2, 3)]
    warmed, turns = LoadOf.calls[:6], [LoadOf.calls[6:12], LoadOf.calls[12:]]
    assert warmed == [("warm up", "speculative", k, streams, {1: 5, 4: 8}[streams], 1) for k, streams in cells]
    wanted = [("run", "speculative", *cell) for cell in cells]
    assert all(sorted(turn) == sorted(wanted) for turn in turns) and turns[0] != turns[1]
    assert [(row["k"], row["streams"]) for row in swept["rows"]] == cells
    assert (swept["best_k"], swept["acceptance"], swept["load_generator"]) == ({"1": 2, "4": 2}, "exact", "a generator")


def test_a_sweeps_table_and_plot(swept: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    bench_sweep.print_sweep_table(swept)
    text = capsys.readouterr().err
    assert re.findall(r"\d+ \(\d+ to \d+\)", text)[3:] == ["32 (31 to 34)", "40 (39 to 42)", "36 (35 to 38)"]
    assert "acceptance length by k: 2: 1.50, 3: 1.75" in text
    figure = MagicMock()
    monkeypatch.setattr(plots, "new_figure", lambda figsize: figure)
    bench_sweep.write_sweep_plot(swept, Path("image"))
    axes = figure.subplots.return_value
    assert [(call.args, call.kwargs["yerr"], call.kwargs["label"]) for call in axes.errorbar.call_args_list] == [
        (([0, 2, 3], [speed * streams for speed in (8, 10, 9)]), [[1] * 3, [2] * 3], f"{streams} streams")
        for streams in (1, 4)
    ]
    axes.set_xticks.assert_called_once_with([0, 2, 3])
    axes.set_ylim.assert_called_once_with(bottom=0)
    figure.savefig.assert_called_once_with(Path("image"), dpi=120)
