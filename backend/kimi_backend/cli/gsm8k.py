"""The task `gsm8k`: word problems whose answers end with `#### NUMBER`, in GSM8K's public JSON lines form."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kimi_backend.errors import InvalidRequestError

_NUMBER = r"-?\$?[0-9][0-9,]*(?:\.[0-9]+)?"
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_ANY = re.compile(_NUMBER)
STOP = ("Question:", "\n\nQ:")
"""A reply that goes on with a question of its own has ended."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One line of the file."""

    question: str
    answer: str
    """Steps, then `#### NUMBER`."""

    @property
    def number(self) -> str:
        """The number that a right reply comes to."""
        found = marked_number(self.answer)
        assert found is not None
        return found


def read_problems(path: Path) -> list[Problem]:
    """
    Raises:
        InvalidRequestError: a line is no JSON object with `question` and `answer`, or its answer has no number; says
            which. OSError: the file cannot be read.
    """
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            problems.append(_read_problem(line, f"{path}:{number}"))
    return problems


def _read_problem(line: str, where: str) -> Problem:
    try:
        entry = json.loads(line)
        question, answer = entry["question"], entry["answer"]
    except (ValueError, KeyError, TypeError):
        raise InvalidRequestError(f"{where}: a JSON object with question and answer is needed") from None
    if not isinstance(question, str) or not isinstance(answer, str) or marked_number(answer) is None:
        raise InvalidRequestError(f"{where}: question and an answer that ends with #### NUMBER are needed, as text")
    return Problem(question, answer)


def few_shot_prompt(examples: Sequence[Problem], problem: Problem) -> str:
    """The examples with their answers, then the problem without."""
    shown = "".join(f"Question: {e.question}\nAnswer: {e.answer}\n\n" for e in examples)
    return f"{shown}Question: {problem.question}\nAnswer:"


def marked_number(text: str) -> str | None:
    """The number behind the first `####`; None where there is none."""
    found = _MARKED.search(text)
    return None if found is None else _plain(found[1])


def last_number(text: str) -> str | None:
    """The last number of a text."""
    found = _ANY.findall(text)
    return _plain(found[-1]) if found else None


def _plain(number: str) -> str:
    """The number without signs of thousands and dollars, and without zeros behind the point."""
    number = number.replace(",", "").replace("$", "")
    return number.rstrip("0").rstrip(".") if "." in number else number
