"""The task gsm8k and the rows of an evaluation; tests/server asks a server."""

import json
import math
import re
from pathlib import Path

import pytest

from kimi_backend.cli.evaluation import Evaluation, RowFile, share_of, summary
from kimi_backend.cli.gsm8k import Problem, few_shot_prompt, last_number, marked_number, read_problems
from kimi_backend.errors import ConfigError, InvalidRequestError

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


def test_a_summary_adds_rounds_up():
    speculation = {
        "num_spec_steps": 4,
        "drafted_per_position": [4, 4, 3],
        "accepted_per_position": [3, 2, 1],
        "acceptance_histogram": [1, 1, 1, 1],
    }
    told = summary([row(0, speculation=speculation), row(1, is_right=False, finish_reason="length")])
    assert told["exact_match"] == {"mean": 0.5, "standard_error": 0.5}
    assert told["cut_off"] == 1
    assert told["speculation"] == {
        "rounds": 4,
        "acceptance_rate": 0.5455,
        "mean_acceptance_length": 2.5,
        "distribution": [0.25] * 4,
        "acceptance_per_position": [0.75, 0.5, 0.3333],
    }
    assert json.dumps(told)


def test_a_standard_error_is_that_of_a_mean():
    found = share_of([True] * 30 + [False] * 70)
    assert found == {"mean": 0.3, "standard_error": round(math.sqrt(0.3 * 0.7 / 99), 5)}
