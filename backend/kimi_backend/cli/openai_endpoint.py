"""`kimi openai`: an OpenAI-compatible endpoint in front of a running server."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ConfigError
from kimi_backend.hosting import with_parent
from kimi_backend.hosting.embedded_server import EVERY_HOST, LOCAL_HOST

if TYPE_CHECKING:
    from kimi_openai.api_keys import ApiKey

API_KEYS_FILE_VARIABLE = "KIMI_API_KEYS_FILE"
"""A file of keys with limits (`kimi_openai.api_keys`)."""
API_KEY_VARIABLE = "KIMI_API_KEY"
"""Not an option: a command line is no place for a secret."""
NAMES_VARIABLE = "KIMI_OPENAI_NAMES"
"""Names of the endpoint, separated by commas (`kimi_openai.own_names`)."""
_STOP_SLACK_S = 25
"""The endpoint waits so much longer for its streams than the server drains."""


def run_endpoint(
    *,
    url: str,
    host: str,
    port: int,
    model_names: Sequence[str],
    splits_thinking: bool,
    has_chat_page: bool,
    metrics_port: int | None,
    access_log: bool,
    log_format: str,
    cors_origins: Sequence[str] = (),
    refuses_unknown_fields: bool = True,
    otlp_endpoint: str = "",
) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
        ConfigError: its packages are not installed, no model name is given, or every origin.
        KimiError: the url has a scheme.
        OSError: the address cannot be taken.
    """
    try:
        import kimi_openai
        from kimi_backend.cli.talk import client_errors
    except ImportError as error:
        raise ConfigError(f"no {error.name}: install the extra, pip install 'kimi-spec-serving[openai]'") from error
    if "*" in cors_origins:
        raise ConfigError("CORS origin: '*' given, name each origin: any page could talk to the models otherwise")
    if "" in model_names:
        raise ConfigError("model name: '' given, a name is needed")
    settings = kimi_openai.EndpointSettings(
        url=url,
        model_names=tuple(model_names),
        api_keys=_read_keys(),
        names=tuple(name.strip() for name in os.environ.get(NAMES_VARIABLE, "").split(",") if name.strip()),
        splits_thinking=splits_thinking,
        has_chat_page=has_chat_page,
        stop_within_s=_STOP_SLACK_S + round(ServingSettings.from_parameters({}, os.environ).drain_timeout_s),
        cors_origins=tuple(cors_origins),
        refuses_unknown_fields=refuses_unknown_fields,
    )
    if log_format not in ("text", "json"):
        raise ConfigError(f"--log-format: {log_format!r} given, text or json is allowed")
    if otlp_endpoint and importlib.util.find_spec("opentelemetry.exporter") is None:
        raise ConfigError("--otlp-endpoint: install the extra, pip install 'kimi-spec-serving[openai,telemetry]'")
    with client_errors():
        kimi_openai.serve(
            settings,
            host=host,
            port=port,
            say=Console(stderr=True, highlight=False).print,
            metrics_port=metrics_port,
            logs_json=log_format == "json",
            logs_access=access_log,
            otlp_endpoint=otlp_endpoint,
        )


def _read_keys() -> "tuple[ApiKey, ...]":
    from kimi_openai.api_keys import ApiKey, BadKeys, read_keys

    one, file = os.environ.get(API_KEY_VARIABLE, ""), os.environ.get(API_KEYS_FILE_VARIABLE, "")
    if one and file:
        raise ConfigError(f"{API_KEY_VARIABLE} and {API_KEYS_FILE_VARIABLE} are both given, one is allowed")
    try:
        return read_keys(Path(file)) if file else (ApiKey.of("default", one),) if one else ()
    except BadKeys as error:
        raise ConfigError(f"{API_KEYS_FILE_VARIABLE}: {error}") from None


def start_beside(*, grpc_port: int, host: str, port: int) -> subprocess.Popen[bytes]:
    """The same as a process of its own, which ends with this one, however it ends.

    Args:
        host: address that the server listens on, and the endpoint then.
    """
    server_host = LOCAL_HOST if host == EVERY_HOST else host
    kimi = [sys.executable, "-m", "kimi_backend.cli.main"]
    options = [f"--url={server_host}:{grpc_port}", f"--host={host}", f"--port={port}"]
    return subprocess.Popen([sys.executable, "-S", with_parent.__file__, str(os.getpid()), *kimi, "openai", *options])
