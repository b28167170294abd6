"""`kimi openai`: an OpenAI-compatible endpoint in front of a running server."""

import importlib.util
import os
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kimi_backend.cli.server_commands import URL_OPTION
from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ConfigError
from kimi_backend.processes import give_large_memory_back, raise_descriptor_limit

if TYPE_CHECKING:
    from kimi_openai.api_keys import ApiKey

API_KEYS_FILE_VARIABLE = "KIMI_API_KEYS_FILE"
"""A file of keys with limits (`kimi_openai.api_keys`)."""
API_KEY_VARIABLE = "KIMI_API_KEY"
"""A variable and no option: a command line is no place for a secret."""
NAMES_VARIABLE = "KIMI_OPENAI_NAMES"
"""Names of the endpoint, separated by commas (`kimi_openai.own_names`)."""
ACCESS_LOG_VARIABLE, LOG_FORMAT_VARIABLE = "KIMI_OPENAI_ACCESS_LOG", "KIMI_OPENAI_LOG_FORMAT"
OTLP_VARIABLE = "KIMI_OPENAI_OTLP_ENDPOINT"
"""Options that a container is given as variables."""
DRAIN_VARIABLE = "KIMI_DRAIN_TIMEOUT_S"
"""The one setting of the server that the endpoint reads: what the others need of each other is the server's matter."""
_STOP_SLACK_S = 25
"""The endpoint waits so much longer for its streams than the server drains."""


class UnknownFields(str, Enum):
    """The endpoint's ways with fields that nobody knows."""

    REFUSE = "refuse"
    WARN = "warn"


def openai_command(
    url: URL_OPTION = "localhost:8001",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes a free one.")] = 9000,
    host: Annotated[
        str, typer.Option(help="Address to listen on. 0.0.0.0, every network, needs a proxy: docs/operations.md.")
    ] = "127.0.0.1",
    model_name: Annotated[
        list[str] | None,
        typer.Option(
            "--model-name", "--served-model-name", help="Name that clients ask for; may be given again (default: kimi)."
        ),
    ] = None,
    split_thinking: Annotated[
        bool, typer.Option(help="Send thoughts as reasoning_content, or leave them in the content as they are written.")
    ] = True,
    chat_page: Annotated[bool, typer.Option(help="Answer / with a chat page for browsers.")] = True,
    metrics_port: Annotated[
        int | None, typer.Option(help="Port of /metrics, on the same host; none by default.")
    ] = None,
    access_log: Annotated[
        bool, typer.Option("--access-log", envvar=ACCESS_LOG_VARIABLE, help="Log each request, with its id.")
    ] = False,
    log_format: Annotated[str, typer.Option(envvar=LOG_FORMAT_VARIABLE, help="text or json.")] = "text",
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin of pages elsewhere that may ask, https://app.example; may be given again."),
    ] = None,
    unknown_fields: Annotated[
        UnknownFields, typer.Option(help="What becomes of a request's fields that nobody knows.")
    ] = UnknownFields.REFUSE,
    otlp_endpoint: Annotated[
        str,
        typer.Option(
            envvar=OTLP_VARIABLE,
            help="OpenTelemetry collector over HTTP, such as http://localhost:4318; none by default.",
        ),
    ] = "",
) -> None:
    """An OpenAI-compatible HTTP endpoint in front of a running server.

    The variable KIMI_API_KEY sets a key, KIMI_API_KEYS_FILE several with limits. See docs/openai.md.
    """
    from rich.console import Console

    try:
        import kimi_openai
        from kimi_backend.cli.talk import client_errors
    except ImportError as error:
        raise ConfigError(f"no {error.name}: install the extra, pip install 'kimi-spec-serving[openai]'") from error
    if "*" in (cors_origin or ()):
        raise ConfigError("CORS origin: '*' given, name each origin: any page could talk to the models otherwise")
    if "" in (model_name or ()):
        raise ConfigError("model name: '' given, a name is needed")
    settings = kimi_openai.EndpointSettings(
        url=url,
        model_names=tuple(model_name or ("kimi",)),
        api_keys=_read_keys(),
        names=tuple(name.strip() for name in os.environ.get(NAMES_VARIABLE, "").split(",") if name.strip()),
        splits_thinking=split_thinking,
        has_chat_page=chat_page,
        stop_within_s=_STOP_SLACK_S + round(_drain_timeout_s()),
        cors_origins=tuple(cors_origin or ()),
        refuses_unknown_fields=unknown_fields is UnknownFields.REFUSE,
    )
    if log_format not in ("text", "json"):
        raise ConfigError(f"--log-format: {log_format!r} given, text or json is allowed")
    if otlp_endpoint and importlib.util.find_spec("opentelemetry.exporter") is None:
        raise ConfigError("--otlp-endpoint: install the extra, pip install 'kimi-spec-serving[openai,telemetry]'")
    say = Console(stderr=True, highlight=False).print
    give_large_memory_back()
    raise_descriptor_limit(say)
    with client_errors():
        kimi_openai.serve(
            settings,
            host=host,
            port=port,
            say=say,
            metrics_port=metrics_port,
            logs_json=log_format == "json",
            logs_access=access_log,
            otlp_endpoint=otlp_endpoint,
        )


def _drain_timeout_s() -> float:
    given = {name: value for name, value in os.environ.items() if name == DRAIN_VARIABLE}
    return ServingSettings.from_parameters({}, given).drain_timeout_s


def _read_keys() -> "tuple[ApiKey, ...]":
    from kimi_openai.api_keys import ApiKey, BadKeys, read_keys

    one, file = os.environ.get(API_KEY_VARIABLE, ""), os.environ.get(API_KEYS_FILE_VARIABLE, "")
    if one and file:
        raise ConfigError(f"{API_KEY_VARIABLE} and {API_KEYS_FILE_VARIABLE} are both given, one is allowed")
    try:
        return read_keys(Path(file)) if file else (ApiKey.of("default", one),) if one else ()
    except BadKeys as error:
        raise ConfigError(f"{API_KEYS_FILE_VARIABLE}: {error}") from None
