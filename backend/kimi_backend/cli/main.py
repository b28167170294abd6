"""The `kimi` command: its subcommands, and one place where errors become one message and exit code 2.

Modules imported here import nothing heavy, so that `kimi --help` answers at once; a command imports torch when it runs.
"""

import sys
from typing import NoReturn

import typer

from kimi_backend.cli.bench import bench_command
from kimi_backend.cli.count_tokens import count_tokens_command
from kimi_backend.cli.health import health_command
from kimi_backend.cli.inspect import inspect
from kimi_backend.cli.make_checkpoint import make_checkpoint_command
from kimi_backend.cli.probe import probe_command
from kimi_backend.cli.server_commands import (
    chat_command,
    demo_command,
    generate_command,
    openai_command,
    serve_command,
)
from kimi_backend.errors import KimiError

EXIT_BAD_INPUT = 2

app = typer.Typer(
    name="kimi",
    help="Kimi-K2.x with EAGLE3 speculative decoding on Triton Server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("inspect")(inspect)
app.command("make-checkpoint")(make_checkpoint_command)
app.command("serve")(serve_command)
app.command("openai")(openai_command)
app.command("generate")(generate_command)
app.command("chat")(chat_command)
app.command("demo")(demo_command)
app.command("bench")(bench_command)
app.command("health")(health_command)
app.command("probe")(probe_command)
app.command("count-tokens")(count_tokens_command)


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
