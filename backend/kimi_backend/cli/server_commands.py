"""The commands around a server: serve, generate, chat, demo. Options only; modules of their own do the work."""

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kimi_backend.cli.setting_options import read_settings, setting_options

URL_OPTION = Annotated[str, typer.Option(help="host:port of the server's gRPC endpoint.")]
MAX_TOKENS_OPTION = Annotated[int, typer.Option(min=1, help="Most output tokens.")]
TEMPERATURE_OPTION = Annotated[float | None, typer.Option(min=0, help="0 is greedy.")]
TOP_P_OPTION = Annotated[float | None, typer.Option(help="Keep the most likely tokens up to this mass.")]
SEED_OPTION = Annotated[int | None, typer.Option(min=0, help="Same seed, same text.")]
K_OPTION = Annotated[int | None, typer.Option("--num-speculative-tokens", "-k", help="Draft tokens a step, 0 to 7.")]


@setting_options()
def serve_command(
    settings: dict[str, str],
    triton_args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- TRITON_ARGS", help="More options of Triton Server, such as --log-verbose=1.", show_default=False
        ),
    ] = None,
    http_port: Annotated[int | None, typer.Option(help="A free one by default.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="A free one by default.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="A free one by default.")] = None,
    openai_port: Annotated[
        int | None, typer.Option("--openai-port", "--port", help="Of an OpenAI-compatible endpoint; none by default.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. 0.0.0.0, every network, needs a proxy: docs/operations.md.")
    ] = "127.0.0.1",
    model_repository: Annotated[Path | None, typer.Option(help="Another model repository than the project's.")] = None,
    log_file: Annotated[Path | None, typer.Option(help="Where the server's log goes instead of this terminal.")] = None,
) -> None:
    """Serve a checkpoint with the real Triton Server on this machine.

    Every setting can be given here, or as the variable KIMI_NAME. Names are vLLM's where they mean the same.
    """
    from kimi_backend.cli.serve import serve

    code = serve(
        read_settings(settings, os.environ),
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        openai_port=openai_port,
        host=host,
        model_repository=model_repository,
        log_file=log_file,
        triton_args=(*shlex.split(os.environ.get("KIMI_TRITON_ARGS", "")), *(triton_args or ())),
    )
    raise typer.Exit(code)


def _sampling(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def generate_command(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.")],
    url: URL_OPTION = "localhost:8001",
    max_tokens: MAX_TOKENS_OPTION = 128,
    temperature: TEMPERATURE_OPTION = None,
    top_p: TOP_P_OPTION = None,
    seed: SEED_OPTION = None,
    num_speculative_tokens: K_OPTION = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output; may be given again.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Stream one completion. Ctrl-C cancels it."""
    from kimi_backend.cli.talk import generate

    fields = _sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        num_speculative_tokens=num_speculative_tokens,
        stop=stop or None,
    )
    if json:
        fields["return_token_ids"] = True
    generate(url, sys.stdin.read() if prompt == "-" else prompt, fields, as_json=json)


def chat_command(
    url: URL_OPTION = "localhost:8001",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: MAX_TOKENS_OPTION = 512,
    temperature: TEMPERATURE_OPTION = None,
    top_p: TOP_P_OPTION = None,
    seed: SEED_OPTION = None,
    num_speculative_tokens: K_OPTION = None,
    thinking: Annotated[bool | None, typer.Option(help="For templates that know a thinking switch.")] = None,
) -> None:
    """Talk to the model, with line editing and a history. Ctrl-C stops an answer, not the server."""
    from kimi_backend.cli.chat import chat

    fields = _sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        num_speculative_tokens=num_speculative_tokens,
        chat_template_kwargs=None if thinking is None else {"thinking": thinking},
    )
    chat(url, system, fields)


def demo_command(
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    max_tokens: MAX_TOKENS_OPTION = 96,
    num_speculative_tokens: Annotated[
        int, typer.Option("--num-speculative-tokens", "-k", min=1, max=7, help="Draft tokens a step.")
    ] = 3,
    temperature: Annotated[
        float,
        typer.Option(min=0, help="0.6 is Kimi-K2's own advice; 0 is greedy: kimi-nano loops then, and gains more."),
    ] = 0.6,
    proposer: Annotated[str, typer.Option(help="Who proposes: eagle3, lookup or lookup+eagle3.")] = "eagle3",
    in_process: Annotated[bool, typer.Option("--in-process", help="Without Triton Server.")] = False,
) -> None:
    """Show one completion with speculation and without: the same text, and how fast each came."""
    from kimi_backend.cli.demo import PROMPT, run_demo

    code = run_demo(
        prompt=PROMPT if prompt is None else prompt,
        max_tokens=max_tokens,
        num_speculative_tokens=num_speculative_tokens,
        temperature=temperature,
        is_in_process=in_process,
        proposer=proposer,
    )
    raise typer.Exit(code)
