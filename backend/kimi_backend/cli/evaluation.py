"""Runs an evaluation against a server, with speculation and without, and can go on where it was broken off."""

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from kimi_backend.cli.gsm8k import STOP, Problem, few_shot_prompt, last_number, marked_number
from kimi_backend.errors import ConfigError
from kimi_client import Completion
from kimi_client.aio import AsyncKimiClient

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """An evaluation says what is run; two runs with equal fields may share rows."""

    task: str
    file_digest: str
    num_shots: int
    num_problems: int
    max_tokens: int
    temperature: float
    seed: int


def digest_of(path: Path) -> str:
    """Names a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


class RowFile:
    """Rows that are done, one JSON object a line behind a line that says what they belong to."""

    def __init__(self, path: Path | None, evaluation: Evaluation) -> None:
        """
        Args:
            path: None keeps the rows in memory alone.

        Raises:
            ConfigError: the file belongs to another evaluation.
        """
        self.rows: dict[tuple[int, int], Row] = {}
        """Rows by (draft tokens asked for, index of the problem)."""
        head = json.dumps(asdict(evaluation))
        self._file: TextIO | None = None
        if path is None:
            return
        lines = path.read_text().splitlines() if path.exists() else []
        if lines and lines[0] != head:
            raise ConfigError(f"{path}: rows of another evaluation; remove it, or name another --json")
        for line in lines[1:]:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # cut off in the middle
            self.rows[row["num_speculative_tokens"], row["index"]] = row
        whole = path.with_name(path.name + ".new")
        whole.write_text("".join(f"{line}\n" for line in [head, *map(json.dumps, self.rows.values())]))
        whole.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def add(self, row: Row) -> None:
        self.rows[row["num_speculative_tokens"], row["index"]] = row
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


async def run_rows(
    url: str,
    examples: Sequence[Problem],
    problems: Sequence[Problem],
    num_speculative_tokens: int,
    evaluation: Evaluation,
    rows: RowFile,
    concurrency: int,
    on_done: Callable[[], None],
) -> float:
    """Ask what is not in `rows` yet; returns the seconds it took.

    Raises:
        KimiClientError: a request failed; what is done is kept.
    """
    missing = iter([i for i in range(len(problems)) if (num_speculative_tokens, i) not in rows.rows])
    start = time.perf_counter()
    async with AsyncKimiClient(url) as client:

        async def worker() -> None:
            for index in missing:
                completion = await client.generate(
                    text_input=few_shot_prompt(examples, problems[index]),
                    max_tokens=evaluation.max_tokens,
                    temperature=evaluation.temperature,
                    seed=evaluation.seed + index,
                    num_speculative_tokens=num_speculative_tokens,
                    stop=list(STOP),
                    stream=False,
                )
                rows.add(make_row(index, num_speculative_tokens, problems[index], completion))
                on_done()

        workers = [asyncio.create_task(worker()) for _ in range(concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    return time.perf_counter() - start


def make_row(index: int, num_speculative_tokens: int, problem: Problem, completion: Completion) -> Row:
    """A row keeps what is needed of one reply."""
    return {
        "index": index,
        "num_speculative_tokens": num_speculative_tokens,
        "is_right": marked_number(completion.text) == problem.number,
        "is_last_number_right": last_number(completion.text) == problem.number,
        "reply": completion.text,
        "finish_reason": completion.finish_reason,
        "num_output_tokens": completion.num_output_tokens,
        "speculation": completion.speculation,
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Scores with their standard errors, and what speculation did."""
    return {
        "num_problems": len(rows),
        "exact_match": share_of([row["is_right"] for row in rows]),
        "last_number_match": share_of([row["is_last_number_right"] for row in rows]),
        "cut_off": sum(row["finish_reason"] == "length" for row in rows),
        "num_output_tokens": sum(row["num_output_tokens"] for row in rows),
        "speculation": _speculation([row["speculation"] for row in rows if row["speculation"]]),
    }


def share_of(hits: Sequence[bool]) -> dict[str, float]:
    """A share and its standard error, that of a mean of independent trials."""
    mean = sum(hits) / len(hits)
    error = math.sqrt(mean * (1 - mean) / (len(hits) - 1)) if len(hits) > 1 else 0.0
    return {"mean": round(mean, 5), "standard_error": round(error, 5)}


def _speculation(stats: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Rounds of all replies together; a round is a verify that carried draft tokens."""
    if not stats:
        return None
    rounds = sum(s["num_spec_steps"] for s in stats)
    drafted = _added([s["drafted_per_position"] for s in stats])
    accepted = _added([s["accepted_per_position"] for s in stats])
    histogram = _added([s["acceptance_histogram"] for s in stats])
    return {
        "rounds": rounds,
        "acceptance_rate": round(sum(accepted) / max(sum(drafted), 1), 4),
        "mean_acceptance_length": round(1 + sum(accepted) / rounds, 4),
        "distribution": [round(count / rounds, 4) for count in histogram],
        "acceptance_per_position": [round(a / d, 4) if d else None for a, d in zip(accepted, drafted, strict=True)],
    }


def _added(lists: Sequence[Sequence[int]]) -> list[int]:
    return [sum(values[i] for values in lists if i < len(values)) for i in range(max(map(len, lists)))]
