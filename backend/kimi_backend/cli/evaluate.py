"""`kimi eval`: how many problems of a file a served model solves, with speculation and without."""

import asyncio
import json as json_format
from dataclasses import asdict
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kimi_backend.errors import InvalidRequestError


class Task(str, Enum):
    """A task says what is asked and how a reply is judged."""

    GSM8K = "gsm8k"


def eval_command(
    file: Annotated[Path, typer.Argument(help="JSON lines with question and answer.")],
    task: Annotated[Task, typer.Option(help="How the file is asked and judged.")] = Task.GSM8K,
    url: Annotated[str, typer.Option(help="host:port of the server's gRPC endpoint.")] = "localhost:8001",
    shots: Annotated[
        int, typer.Option(min=0, help="Examples before each question: the file's first ones, which are not asked.")
    ] = 5,
    limit: Annotated[int | None, typer.Option(min=1, help="Ask so many at most.")] = None,
    num_speculative_tokens: Annotated[
        int, typer.Option("--num-speculative-tokens", "-k", min=0, max=7, help="Draft tokens a step.")
    ] = 3,
    compare: Annotated[bool, typer.Option(help="Ask all again without speculation.")] = True,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most output tokens of a reply.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Problem i gets seed + i.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Most requests that run together.")] = 16,
    json: Annotated[
        Path | None,
        typer.Option(help="Write the result there; replies stand in FILE.rows, from which a broken-off run goes on."),
    ] = None,
) -> None:
    """Solve a file of problems and say how many are right, with the standard error and what speculation did."""
    from rich.console import Console
    from rich.progress import Progress

    from kimi_backend.cli.evaluation import Evaluation, RowFile, digest_of, run_rows, summary
    from kimi_backend.cli.gsm8k import read_problems
    from kimi_backend.cli.talk import client_errors

    given = read_problems(file)
    examples, problems = given[:shots], given[shots:][:limit]
    if not problems:
        raise InvalidRequestError(f"{file}: {len(given)} problems, more than the {shots} examples are needed")
    evaluation = Evaluation(
        task=task.value,
        file_digest=digest_of(file),
        num_shots=shots,
        num_problems=len(problems),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
    )
    ks = [num_speculative_tokens, *([0] if compare and num_speculative_tokens else [])]
    rows = RowFile(None if json is None else json.with_name(json.name + ".rows"), evaluation)
    console = Console(stderr=True)
    report = {"file": file.name, **asdict(evaluation), "runs": {}}
    try:
        with client_errors(), Progress(console=console) as progress:
            for k in ks:
                done = sum(key[0] == k for key in rows.rows)
                bar = progress.add_task(f"k = {k}", total=len(problems), completed=done)
                on_done = partial(progress.advance, bar)
                seconds = asyncio.run(run_rows(url, examples, problems, k, evaluation, rows, concurrency, on_done))
                told = summary([rows.rows[k, i] for i in range(len(problems))])
                report["runs"][f"k={k}"] = {**told, "seconds": round(seconds, 3), "num_resumed": done}
    finally:
        rows.close()
    text = json_format.dumps(report, indent=1)
    if json is not None:
        json.write_text(text + "\n")
    typer.echo(text)
