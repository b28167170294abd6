"""`kimi bench` against a server that is scripted: the requests it sends, what it reports of them, and its tables."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from typer.testing import CliRunner

from kimi_backend.cli import bench_server, bench_trace, plots
from kimi_backend.cli.bench_server import ServerLoad, bench, print_table, write_plot
from kimi_backend.cli.bench_trace import Limits, TraceLoad, print_trace_table, write_trace_plot
from kimi_backend.cli.main import app
from kimi_backend.cli.trace_file import Session, Turn
from kimi_backend.cli.trace_prompts import NUM_SAMPLES, PIECE, sample_pool
from kimi_backend.errors import InvalidRequestError, KimiError
from kimi_client import Completion
from kimi_client.load import LoadResult, RequestTimes
from kimi_client.replay import ReplayResult, TimedSession
from support.made_up_costs import linear_costs
from support.printed_tables import rows_of

COSTS = {"target": asdict(linear_costs(3000, 40)), "draft": asdict(linear_costs(100, 5, 10))}
ROUNDS = {
    "num_spec_steps": 4,
    "num_draft_tokens": 10,
    "num_accepted_draft_tokens": 5,
    "drafted_per_position": [4, 4, 2],
    "accepted_per_position": [3, 2, 0],
}
LOAD = ServerLoad(
    url="localhost:1",
    prompts=[{"text_input": "a"}, {"text_input": "b"}],
    fields={"max_tokens": 4},
    concurrency=2,
    num_requests=3,
    load_generator="own",
)


def completion(text: str = "", num_tokens: int = 1, **statistics: Any) -> Completion:
    return Completion(
        text=text, finish_reason="length", stop_reason=None, num_output_tokens=num_tokens,
        token_ids=tuple(range(num_tokens)), logprobs=(), statistics=statistics,
    )  # fmt: skip


class Server:
    """Answers loads: with speculation twice as fast, with the seed as text; and single requests."""

    def __init__(self, *, num_written: int = 64) -> None:
        self.loads: list[tuple[list[dict[str, Any]], int]] = []
        self.asked: list[dict[str, Any]] = []
        self.num_written = num_written
        self.fails = False
        self.plain_text = ""

    async def run_load(self, url: str, requests: list[dict[str, Any]], concurrency: int, advance: Any) -> LoadResult:
        self.loads.append((requests, concurrency))
        is_plain = requests[0].get("num_speculative_tokens") == 0
        statistics: dict[str, Any] = {"speculation_policy": "fixed", "num_draft_tokens_histogram": [1, 0, 0, 3]}
        if not is_plain:
            statistics |= {"speculative_decoding": ROUNDS, "speculation_by_proposer": {"eagle3": ROUNDS}}
        done = [
            RequestTimes((0.1, 0.2), completion(f"{r.get('seed')}{self.plain_text * is_plain}", 10, **statistics))
            for r in requests
        ]
        return LoadResult(concurrency, 2.0 if is_plain else 1.0, () if self.fails else tuple(done), ("full",))

    def generate(self, **fields: Any) -> Completion:
        self.asked.append(fields)
        return completion(step_costs=COSTS if fields.get("return_step_costs") else {})

    def stream(self, **fields: Any) -> Any:
        self.asked.append(fields)
        return SimpleNamespace(result=lambda: completion(num_tokens=self.num_written))

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(bench_server, "run_load", made.run_load)
    for module in (bench_server, bench_trace):
        monkeypatch.setattr(module, "KimiClient", lambda url: made)
    return made


def test_a_comparison_sends_both_sides_the_same_in_turns_and_reports_them(server: Server) -> None:
    report = bench(LOAD, compare_no_spec=True, repeats=2, limit_s=0)
    loads = [(len(r), concurrency, r[0].get("num_speculative_tokens")) for r, concurrency in server.loads]
    assert loads == [(2, 2, None), (2, 2, 0), (3, 2, None), (3, 2, 0), (3, 2, 0), (3, 2, None)]
    warm_up, *_, run = [requests for requests, _ in server.loads]
    assert [(r["text_input"], r["seed"], r["max_tokens"]) for r in run] == [("a", 0, 4), ("b", 1, 4), ("a", 2, 4)]
    assert all("cache_salt" not in request for request in warm_up)
    assert len({r["cache_salt"] for requests, _ in server.loads[2:] for r in requests}) == 4
    assert (report["load_generator"], report["texts_equal"], report["comparison"]["pairs"]) == ("own", True, 2)
    assert report["step_costs"]["device"] == "the server's machine"
    assert report["step_costs"]["target"]["step_ms"]["4"]["2"] == 3.32
    fast, plain = report["speculative"], report["plain"]
    assert (fast["runs"], fast["requests"], fast["errors"], fast["acceptance"]) == (2, 6, 2, "real")
    assert (fast["output_tokens_per_second"], plain["output_tokens_per_second"]) == (30.0, 15.0)
    assert plain["output_tokens_per_second_range"] == [15.0, 15.0]


def test_other_texts_without_speculation_are_told(server: Server) -> None:
    server.plain_text = "!"
    assert bench(LOAD, compare_no_spec=True, repeats=1, limit_s=0)["texts_equal"] is False


def test_one_side_is_run_once_with_any_seed(server: Server) -> None:
    report = bench(LOAD, compare_no_spec=False, repeats=None, limit_s=0)
    assert [len(requests) for requests, _ in server.loads] == [2, 3]
    assert all("seed" not in request for requests, _ in server.loads for request in requests)
    assert (report["speculative"]["runs"], "comparison" in report) == (1, False)
    server.fails = True
    with pytest.raises(KimiError, match="no request of the load came to its end: full"):
        bench(LOAD, compare_no_spec=False, repeats=None, limit_s=0)


def test_the_load_generator_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_server, "find_perf_analyzer", lambda: "/bin/pa")
    choose = bench_server._choose
    assert [choose(name) for name in ("auto", "own", "perf_analyzer")] == ["/bin/pa", None, "/bin/pa"]
    monkeypatch.setattr(bench_server, "find_perf_analyzer", lambda: None)
    assert choose("auto") is None
    for name, message in {"perf_analyzer": "is not installed", "k6": "'k6' given"}.items():
        with pytest.raises(InvalidRequestError, match=message):
            choose(name)


def test_a_comparisons_table(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    print_table(bench(LOAD, compare_no_spec=True, repeats=2, limit_s=0))
    text = capsys.readouterr().err
    rows = rows_of(text)
    assert "kimi bench, acceptance real" in text
    assert rows["runs"] == ["2", "2"]
    assert rows["output_tokens_per_second"] == ["30.0", "15.0"]
    assert rows["interval"] == ["30.0 to 30.0", "15.0 to 15.0"]
    assert rows["inter_token_ms p90"] == ["11.111", "11.111"]
    assert rows["acceptance length"] == ["2.25", ""]
    assert rows["per position"] == ["[0.75, 0.5, 0.0]", ""]
    assert rows["eagle3"] == ["24 rounds, length 2.25", ""]
    assert rows["speculation policy"] == ["fixed", "fixed"]
    assert rows["verifies with k = 0, 1, …"] == ["[0.25, 0.0, 0.0, 0.75]"] * 2
    assert "undecided: 2.00 x" in text and "texts equal: True" in text
    assert "draft's steps, ms" in text


def test_a_table_of_one_side_that_never_speculated(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench(replace(LOAD, fields={"num_speculative_tokens": 0}), compare_no_spec=False, repeats=1, limit_s=0)
    report["speculative"] |= {"inter_token_ms": None, "policy": None, "pretences": ["routing uniform"]}
    print_table(report | {"step_costs": None})
    text = capsys.readouterr().err
    rows = rows_of(text)
    assert "acceptance real, routing uniform" in text
    assert (rows["inter_token_ms p50"], rows["speculation policy"]) == (["-"], ["-"])
    assert "acceptance length" not in rows
    assert "steps, ms" not in text


def test_a_plot_sets_both_sides_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = MagicMock(), MagicMock()
    figure = MagicMock()
    figure.subplots.return_value = left, right
    monkeypatch.setattr(plots, "new_figure", lambda **_: figure)
    times = {"first_token_ms": {"p50": 8.0}, "inter_token_ms": {"p50": 2.0}, "inter_chunk_ms": None}
    write_plot({"speculative": {**times, "speculation": None}, "plain": times}, Path("plot.png"))
    bars = [call.args for call in left.bar.call_args_list]
    assert bars == [([0.4 * i + at for at in range(3)], [8.0, 2.0, 0], 0.38) for i in range(2)]
    assert [call.kwargs["label"] for call in left.bar.call_args_list] == ["speculative", "plain"]
    assert left.set_xticks.call_args.args[0] == [0.2, 1.2, 2.2]
    figure.subplots.assert_called_once_with(1, 2)
    left.legend.assert_called_once_with()
    right.set_ylim.assert_called_once_with(0, 1)


TRACE = TraceLoad(
    url="localhost:1",
    sessions=[
        Session(0.0, (Turn(input_length=40, output_length=4),)),
        Session(1.0, (Turn(input_length=9, output_length=2),)),
    ],
    fields={"seed": 3},
    block_size=64,
    limits=Limits(first_token_ms=150, request_ms=400),
)


def replayed(monkeypatch: pytest.MonkeyPatch, *totals_s: float, errors: tuple[str, ...] = ()) -> list[Any]:
    """Have a replay end with requests of 4 tokens that took so long, the first half of it for the first token."""
    sent = list[Any]()

    async def replay(url: str, sessions: list[TimedSession], on_done: Any) -> ReplayResult:
        sent.extend(turn.fields([]) for session in sessions for turn in session.turns)
        statistics = {"num_prompt_tokens": 40, "num_cached_tokens": 10}
        done = tuple(RequestTimes((total / 2, total), completion("", 4, **statistics)) for total in totals_s)
        return ReplayResult(LoadResult(2, 4.0, done, errors), (0.001, 0.06), 2)

    monkeypatch.setattr(bench_trace, "replay", replay)
    return sent


def test_a_trace_is_replayed_and_reported(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = replayed(monkeypatch, 0.2, 0.5, errors=("full",))
    report, _ = bench_trace.bench_trace(TRACE)
    assert [(len(f["input_ids"]), f["max_tokens"], f["seed"], f["ignore_eos"]) for f in sent] == [
        (40, 4, 3, True),
        (9, 2, 4, True),
    ]
    assert len({fields["cache_salt"] for fields in sent}) == 1
    assert not sent[0]["return_token_ids"]
    assert len(server.asked) == NUM_SAMPLES
    assert (report["requests"], report["trace_requests"], report["sessions"], report["errors"]) == (2, 2, 2, 1)
    assert (report["prompt_tokens"], report["output_tokens"], report["cached_prompt_share"]) == (80, 8, 0.25)
    assert report["late_ms"]["p50"] == 30.5
    assert report["goodput"] == {
        "limits": {"first_token_ms": 150, "request_ms": 400},
        "requests_per_second": 0.25,
        "share": 0.5,
        "broken": {"first_token_ms": 1, "request_ms": 1},
    }
    assert (report["first_error"], "concurrency" in report) == ("full", False)
    capsys.readouterr()
    print_trace_table(report)
    text = capsys.readouterr().err
    rows = rows_of(text)
    assert rows["first_token_ms"] == ["175.0", "235.0", "242.5", "248.5"]
    assert rows["late_ms"][:2] == ["30.5", "54.1"]
    said = " ".join(text.split())
    assert "2 of 2 requests in 4 s, at most 2 at once; 2 output tokens/s; no speculation; 25% of prompt" in said
    assert "goodput (first_token_ms ≤ 150, request_ms ≤ 400): 50.0%, 0.25 requests/s" in said
    assert "1 failed, the first with: full" in said
    assert "requests were sent late" in said


def test_a_trace_of_texts_needs_no_pool_and_all_is_well(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = replayed(monkeypatch, 0.2)
    session = Session(0.0, (Turn(input_length=0, output_length=4, text="hi"),))
    report, _ = bench_trace.bench_trace(replace(TRACE, sessions=[session], limits=Limits(), fields={}))
    assert (sent[0]["text_input"], "seed" in sent[0], "input_ids" in sent[0]) == ("hi", False, False)
    assert [fields["text_input"] for fields in server.asked] == ["def "]
    assert report["first_error"] is None
    late = {"p50": 1.0, "p90": 2.0, "p95": 50.0, "p99": 2000.0}
    rounds = {"acceptance_length": 2.5}
    capsys.readouterr()
    print_trace_table(report | {"late_ms": late, "inter_token_ms": None, "speculation": rounds})
    text = capsys.readouterr().err
    rows = rows_of(text)
    assert (rows["late_ms"], rows["inter_token_ms"]) == (["1.0", "2.0", "50.0", "2,000.0"], ["-"] * 4)
    assert "acceptance length 2.5" in text and "goodput (no limits given): 100.0%" in text
    assert "failed" not in text and "late:" not in text


def test_a_trace_of_which_nothing_ended_is_an_error(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed(monkeypatch, errors=("full",))
    with pytest.raises(KimiError, match="no request of the trace came to its end: full"):
        bench_trace.bench_trace(TRACE)


def test_a_traces_plot_has_a_curve_and_a_limit_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = [MagicMock(), MagicMock(), MagicMock()]
    figure = MagicMock()
    figure.subplots.return_value = figure.axes = axes
    monkeypatch.setattr(plots, "new_figure", lambda **_: figure)
    done = (RequestTimes((0.2, 0.5), completion("", 4)), RequestTimes((0.1,), completion("", 1)))
    result = ReplayResult(LoadResult(2, 4.0, done), (), 2)
    report = {"trace_requests": 4, "acceptance": "real", "rate_scale": 2.0}
    write_trace_plot(report, result, Limits(inter_token_ms=70), Path("plot.png"))
    assert [call.step.call_args.args for call in axes] == [
        ([100.0, 200.0], [25.0, 50.0]),
        ([pytest.approx(100.0)], [25.0]),
        ([100.0, 500.0], [25.0, 50.0]),
    ]
    assert [call.axvline.call_count for call in axes] == [0, 1, 0]
    assert axes[1].axvline.call_args.args == (70,)
    figure.subplots.assert_called_once_with(1, 3)
    for each in axes:
        each.set_xscale.assert_called_once_with("log")
        each.set_ylim.assert_called_once_with(0, 100)
    axes[0].set_ylabel.assert_called_once()
    figure.savefig.assert_called_once_with(Path("plot.png"), dpi=120)


def test_the_model_writes_the_text_of_prompts_the_same_each_time(server: Server) -> None:
    pool = sample_pool(server, 16, openings=("a", "b"))  # type: ignore[arg-type]
    assert (pool.block_size, pool.token_ids) == (16, tuple(range(64)) * NUM_SAMPLES)
    assert [(f["text_input"], f["seed"]) for f in server.asked[:3]] == [("a", 0), ("b", 1), ("a", 2)]
    assert all((f["temperature"], f["ignore_eos"], f["return_token_ids"]) == (1.0, True, True) for f in server.asked)
    server.num_written = 4 * PIECE // NUM_SAMPLES
    assert len(sample_pool(server, 16).token_ids) == 4 * PIECE  # type: ignore[arg-type]
    server.num_written -= 1
    with pytest.raises(KimiError, match="wrote 96 tokens"):
        sample_pool(server, 16)  # type: ignore[arg-type]


def test_a_server_is_asked_for_its_costs(server: Server) -> None:
    assert json.dumps(bench_server._served_costs("url"))
    assert server.asked[0] == {"text_input": "1", "max_tokens": 1, "return_step_costs": True}


class Command:
    """`kimi bench` whose measurements are replaced: what each was asked for, and what was shown and drawn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        self.shown: list[Any] = []
        self.drawn: list[Any] = []

        def bench(load: ServerLoad, **options: Any) -> dict[str, str]:
            self.asked.append((load, options))
            return {"a": "report"}

        def sweep(load: ServerLoad, *numbers: Any) -> dict[str, str]:
            self.asked.append((load, *numbers))
            return {"a": "sweep"}

        def replay(load: TraceLoad) -> tuple[dict[str, str], str]:
            self.asked.append(load)
            return {"a": "trace"}, "result"

        monkeypatch.setattr(bench_server, "bench", bench)
        monkeypatch.setattr("kimi_backend.cli.bench_sweep.sweep", sweep)
        monkeypatch.setattr(bench_trace, "bench_trace", replay)
        for module in ("bench_server.print_table", "bench_sweep.print_sweep_table", "bench_trace.print_trace_table"):
            monkeypatch.setattr(f"kimi_backend.cli.{module}", self.shown.append)
        for module in ("bench_server.write_plot", "bench_sweep.write_sweep_plot", "bench_trace.write_trace_plot"):
            monkeypatch.setattr(f"kimi_backend.cli.{module}", lambda *given: self.drawn.append(given))

    def run(self, *options: str) -> str:
        done = CliRunner().invoke(app, ["bench", *options], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(monkeypatch)


def test_without_options_eight_prompts_run_once(command: Command) -> None:
    assert command.run() == ""
    ((load, options),) = command.asked
    fields = {
        "max_tokens": 128,
        "temperature": 1.0,
        "top_p": 1.0,
        "ignore_eos": False,
        "num_speculative_tokens": 3,
    }
    assert (load.url, load.fields, load.load_generator) == ("localhost:8001", fields, "auto")
    assert len(load.prompts) == load.num_requests == load.concurrency == 8
    assert options == {"compare_no_spec": False, "repeats": None, "limit_s": 120.0}
    assert (command.shown, command.drawn) == ([{"a": "report"}], [])


def test_options_reach_the_load(command: Command, tmp_path: Path) -> None:
    shape = ["--num-requests=3", "--concurrency=2", "--repeats=4", "--time-limit=5", "--load-generator=own"]
    sampling = ["--seed=0", "--proposer=lookup", "--temperature=0", "-k", "0", "--ignore-eos"]
    out = command.run(*shape, *sampling, "--compare-no-spec", f"--plot={tmp_path / 'plot'}", "--json")
    assert json.loads(out) == {"a": "report"}
    ((load, options),) = command.asked
    assert (load.num_requests, load.concurrency, load.load_generator) == (3, 2, "own")
    assert (load.fields["seed"], load.fields["proposer"], load.fields["num_speculative_tokens"]) == (0, "lookup", 0)
    assert options == {"compare_no_spec": True, "repeats": 4, "limit_s": 5.0}
    assert (command.shown, command.drawn) == ([], [({"a": "report"}, tmp_path / "plot")])


def test_a_sweep_has_its_numbers(command: Command, tmp_path: Path) -> None:
    command.run("--sweep-k=3,0", "--sweep-streams=4,1,4", "--repeats=2", f"--plot={tmp_path / 'plot'}")
    ((load, ks, streams, repeats),) = command.asked
    assert (load.num_requests, ks, streams, repeats) == (8, [0, 3], [1, 4], 2)
    assert (command.shown, command.drawn) == ([{"a": "sweep"}], [({"a": "sweep"}, tmp_path / "plot")])


def test_a_trace_has_its_scales_and_limits(command: Command, tmp_path: Path) -> None:
    line = json.dumps({"timestamp": 0, "input_length": 5, "output_length": 2})
    (tmp_path / "trace").write_text(f"{line}\n{line}\n{line}\n")
    trace = [f"--trace={tmp_path / 'trace'}", "--num-requests=2"]
    command.run(*trace)
    scales = ["--rate-scale=2", "--length-scale=0.5", "--trace-block=64"]
    limits = ["--first-token-limit-ms=1", "--inter-token-limit-ms=2", "--request-limit-ms=3"]
    command.run(*trace, *scales, *limits, f"--plot={tmp_path / 'plot'}")
    plain, scaled = command.asked
    assert (plain.num_requests, plain.rate_scale, plain.length_scale, plain.block_size) == (2, 1.0, 1.0, 512)
    assert plain.limits == Limits()
    assert (scaled.rate_scale, scaled.length_scale, scaled.block_size) == (2.0, 0.5, 64)
    assert scaled.limits == Limits(first_token_ms=1, inter_token_ms=2, request_ms=3)
    assert command.drawn == [({"a": "trace"}, "result", scaled.limits, tmp_path / "plot")]


def test_in_process_it_has_settings_of_its_own(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        "kimi_backend.cli.bench_in_process.run_bench", lambda *given: asked.append(given) or {"a": "report"}
    )
    monkeypatch.setattr("kimi_backend.cli.bench_in_process.print_report", command.shown.append)
    command.run("--in-process", f"--checkpoint={tmp_path}", "--proposer=none", "--concurrency=5", "--seed=7", "-k", "2")
    ((settings, prompts, load),) = asked
    assert (settings.checkpoint, settings.speculation_policy, settings.max_num_seqs) == (str(tmp_path), "fixed", 5)
    assert (settings.proposer, prompts, load.num_speculative_tokens, load.num_requests) == ("none", None, 2, None)
    assert (load.sampling.seed, load.sampling.max_tokens, load.sampling.temperature) == (7, 128, 1.0)
    assert command.shown == [{"a": "report"}]
