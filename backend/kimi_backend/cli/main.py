"""The `kimi` command: its subcommands, and one place where errors become one message and exit code 2.

Modules imported here import nothing heavy, so that `kimi --help` answers at once; a command imports torch when it runs.
"""

import sys
from collections.abc import Callable
from importlib import metadata
from typing import Annotated, NoReturn

import typer

from kimi_backend.cli.bench import bench_command
from kimi_backend.cli.count_tokens import count_tokens_command
from kimi_backend.cli.evaluate import eval_command
from kimi_backend.cli.health import health_command
from kimi_backend.cli.inspect import inspect
from kimi_backend.cli.make_checkpoint import make_checkpoint_command
from kimi_backend.cli.openai_endpoint import openai_command
from kimi_backend.cli.probe import probe_command
from kimi_backend.cli.server_commands import (
    chat_command,
    demo_command,
    generate_command,
    serve_command,
)
from kimi_backend.errors import KimiError

EXIT_BAD_INPUT = 2
DISTRIBUTION = "kimi-spec-serving"

app = typer.Typer(
    name="kimi",
    help="Kimi-K2.x with EAGLE3 speculative decoding on Triton Server.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "inspect": (inspect, "kimi inspect /models/Kimi-K2.5 --draft /models/Kimi-K2.5-eagle3 --gpu-memory 141 --tp 8"),
    "make-checkpoint": (make_checkpoint_command, "kimi make-checkpoint /tmp/tiny"),
    "serve": (serve_command, "kimi serve --checkpoint demo/kimi-nano --draft demo/kimi-nano/draft --grpc-port 8001"),
    "openai": (openai_command, "kimi openai --url localhost:8001 --port 9000"),
    "generate": (generate_command, "kimi generate 'def add(a, b):' --max-tokens 32 --temperature 0"),
    "chat": (chat_command, "kimi chat --system 'You answer in one sentence.' --temperature 0.6"),
    "demo": (demo_command, "kimi demo --temperature 0"),
    "bench": (bench_command, "kimi bench --prompts mine.jsonl --concurrency 4 --compare-no-spec"),
    "eval": (eval_command, "kimi eval problems.jsonl --task gsm8k --json result.json"),
    "health": (health_command, "kimi health --url localhost:8000 --draft"),
    "probe": (probe_command, "kimi probe /models/Kimi-K2.5 --draft /models/Kimi-K2.5-eagle3 --prompts mine.jsonl"),
    "count-tokens": (count_tokens_command, "kimi count-tokens /models/Kimi-K2.5 answers.jsonl --out counts.json"),
}
"""Name -> (function, an example for its --help)."""

for _name, (_function, _example) in COMMANDS.items():
    app.command(_name, epilog=f"Example: {_example}")(_function)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"kimi {metadata.version(DISTRIBUTION)}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point."""
    try:
        app()
    except KimiError as error:
        _fail(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}")


def _fail(message: str) -> NoReturn:
    """Exit with the message; names that come from a checkpoint's files cannot steer the terminal."""
    shown = "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in message)
    typer.echo(f"error: {shown}", err=True)
    sys.exit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    main()
