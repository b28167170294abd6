"""The task gsm8k and the rows of an evaluation; tests/server asks a server."""

import asyncio
import json
import math
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kimi_backend.cli.evaluation import Evaluation, RowFile, run_rows, share_of, summary
from kimi_backend.cli.gsm8k import STOP, Problem, few_shot_prompt, last_number, marked_number, read_problems
from kimi_backend.cli.main import app
from kimi_backend.errors import ConfigError, InvalidRequestError
from kimi_client import Completion, KimiClientError

ARITHMETIC = Path(__file__).resolve().parents[3] / "benchmarks/arithmetic.jsonl"


def evaluation(**changes):
    fields = {"num_shots": 2, "num_problems": 3, "max_tokens": 9, "temperature": 0.0, "seed": 0, **changes}
    return Evaluation(task="gsm8k", file_digest="d", **fields)


def test_every_problem_of_ours_has_the_answer_that_its_steps_come_to():
    problems = read_problems(ARITHMETIC)
    assert len(problems) > 20
    for problem in problems:
        *_, last_sum = re.findall(r"(\d+) ([*+/-]) (\d+) = (\d+)", problem.answer)
        assert problem.number == last_sum[3]
        assert eval("".join(last_sum[:3])) == int(problem.number)  # two numbers and a sign


@pytest.mark.parametrize(
    ("text", "marked", "last"),
    [
        ("So 3 + 4 = 7.\n#### 7", "7", "7"),
        ("#### 1,234.50 then 9", "1234.5", "9"),
        ("#### -$12", "-12", "-12"),
        ("it is 10", None, "10"),
        ("none", None, None),
        ("#### 100", "100", "100"),
    ],
)
def test_numbers_of_a_reply(text, marked, last):
    assert (marked_number(text), last_number(text)) == (marked, last)


def test_a_prompt_shows_the_examples_and_asks_the_last():
    asked = few_shot_prompt([Problem("a", "1\n#### 1")], Problem("b", "2\n#### 2"))
    assert asked == "Question: a\nAnswer: 1\n#### 1\n\nQuestion: b\nAnswer:"


NO_PROBLEMS = [
    "{",
    "[]",
    '{"question": "a"}',
    '{"question": "a", "answer": "7"}',
    '{"question": 1, "answer": "#### 1"}',
]


@pytest.mark.parametrize("line", NO_PROBLEMS)
def test_a_line_that_is_no_problem_is_named(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "a", "answer": "#### 1"}\n' + line + "\n")
    with pytest.raises(InvalidRequestError, match=r"p\.jsonl:2: "):
        read_problems(path)


def row(index, **changes):
    fields = {"is_right": True, "is_last_number_right": True, "finish_reason": "stop", "num_output_tokens": 3}
    return {"index": index, "num_speculative_tokens": 3, **fields, "reply": "", "speculation": None, **changes}


def test_rows_survive_a_run_that_is_cut_off(tmp_path):
    path = tmp_path / "out.rows"
    rows = RowFile(path, evaluation())
    rows.add(row(0))
    rows.add(row(2))
    rows.close()
    path.write_text(path.read_text()[:-20])
    again = RowFile(path, evaluation())
    assert set(again.rows) == {(3, 0)}
    again.add(row(1))
    again.close()
    last = RowFile(path, evaluation())
    last.close()
    assert set(last.rows) == {(3, 0), (3, 1)}
    with pytest.raises(ConfigError, match="another evaluation"):
        RowFile(path, evaluation(seed=1))
    assert len(path.read_text().splitlines()) == 3


def rounds(number, drafted, accepted, histogram):
    return {
        "num_spec_steps": number,
        "drafted_per_position": drafted,
        "accepted_per_position": accepted,
        "acceptance_histogram": histogram,
    }


def test_a_summary_adds_rounds_up():
    rows = [
        row(0, speculation=rounds(4, [4, 4, 3, 0], [3, 2, 1, 0], [1, 1, 1, 1, 0])),
        row(1, is_right=False, finish_reason="length"),
        row(2, is_right=False, speculation=rounds(2, [2], [1], [1, 1]), num_output_tokens=5),
    ]
    told = summary(rows)
    assert told["exact_match"] == {"mean": 0.33333, "standard_error": 0.33333}
    assert told["last_number_match"] == {"mean": 1.0, "standard_error": 0.0}
    assert (told["num_problems"], told["cut_off"], told["num_output_tokens"]) == (3, 1, 11)
    assert told["speculation"] == {
        "rounds": 6,
        "acceptance_rate": 0.5385,
        "mean_acceptance_length": 2.1667,
        "distribution": [0.3333, 0.3333, 0.1667, 0.1667, 0.0],
        "acceptance_per_position": [0.6667, 0.5, 0.3333, None],
    }
    assert json.dumps(told)


def test_a_summary_of_one_reply_without_speculation():
    told = summary([row(0)])
    assert (told["speculation"], told["exact_match"]) == (None, {"mean": 1.0, "standard_error": 0.0})


class Client:
    """Answers problems at once and keeps what was asked; the third request fails."""

    def __init__(self):
        self.asked = []

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def generate(self, **fields):
        self.asked.append(fields)
        if len(self.asked) == 3:
            raise KimiClientError("full")
        return Completion(
            text="#### 7", finish_reason="stop", stop_reason=None, num_output_tokens=3, token_ids=(), logprobs=(),
            statistics={},
        )  # fmt: skip


def test_only_what_is_missing_is_asked_and_a_failure_keeps_what_is_done(monkeypatch):
    client, ended = Client(), []
    monkeypatch.setattr("kimi_backend.cli.evaluation.AsyncKimiClient", lambda url: client)
    problems = [Problem(f"{n}", f"#### {n}") for n in range(5, 10)]
    rows = RowFile(None, evaluation())
    rows.add(row(1))

    def ask():
        given = ("url", [], problems, 3, evaluation(seed=40, temperature=0.5), rows, 1, lambda: ended.append(1))
        return asyncio.run(run_rows(*given))

    with pytest.raises(KimiClientError, match="full"):
        ask()
    assert set(rows.rows) == {(3, 0), (3, 1), (3, 2)}
    assert (rows.rows[3, 0]["is_right"], rows.rows[3, 2]["is_right"], len(ended)) == (False, True, 2)
    assert ask() >= 0
    assert [fields["seed"] for fields in client.asked] == [40, 42, 43, 43, 44]
    assert client.asked[0] == {
        "text_input": "Question: 5\nAnswer:",
        "max_tokens": 9,
        "temperature": 0.5,
        "seed": 40,
        "num_speculative_tokens": 3,
        "stop": list(STOP),
        "stream": False,
    }


def test_the_command_asks_both_sides_and_writes_what_it_says(monkeypatch, tmp_path):
    asked = []

    async def run(url, examples, problems, k, given, rows, concurrency, on_done):
        asked.append((url, len(examples), [p.question for p in problems], k, given.num_problems, concurrency))
        for index in range(len(problems)):
            rows.add(row(index, num_speculative_tokens=k))
        return 1.2344

    monkeypatch.setattr("kimi_backend.cli.evaluation.run_rows", run)
    file, out = tmp_path / "p.jsonl", tmp_path / "out.json"
    file.write_text("".join(json.dumps({"question": str(n), "answer": f"#### {n}"}) + "\n" for n in range(5)))
    options = ["eval", str(file), "--shots=1", "--limit=2", "-k", "2", f"--json={out}"]
    done = CliRunner().invoke(app, options, catch_exceptions=False)
    assert asked == [("localhost:8001", 1, ["1", "2"], k, 2, 16) for k in (2, 0)]
    report = json.loads(out.read_text())
    assert json.loads(done.stdout) == report
    assert (report["file"], report["num_problems"], report["num_shots"]) == ("p.jsonl", 2, 1)
    assert [(name, r["seconds"], r["num_resumed"]) for name, r in report["runs"].items()] == [
        ("k=2", 1.234, 0),
        ("k=0", 1.234, 0),
    ]
    assert len((tmp_path / "out.json.rows").read_text().splitlines()) == 5
    CliRunner().invoke(app, [*options, "--no-compare"], catch_exceptions=False)
    assert json.loads(out.read_text())["runs"]["k=2"]["num_resumed"] == 2
    assert [k for *_, k, _, _ in asked[2:]] == [2]
    CliRunner().invoke(app, ["eval", str(file), "-k", "0", "--shots=1"], catch_exceptions=False)
    assert [k for *_, k, _, _ in asked[3:]] == [0]
    with pytest.raises(InvalidRequestError, match=r"p\.jsonl: 5 problems, more than the 5 examples are needed"):
        CliRunner().invoke(app, ["eval", str(file)], catch_exceptions=False)


def test_a_standard_error_is_that_of_a_mean():
    found = share_of([True] * 30 + [False] * 70)
    assert found == {"mean": 0.3, "standard_error": round(math.sqrt(0.3 * 0.7 / 99), 5)}
