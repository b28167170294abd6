"""`kimi openai`: an OpenAI-compatible endpoint in front of a running server."""

import os
import subprocess
import sys
from collections.abc import Sequence

from rich.console import Console

from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ConfigError
from kimi_backend.hosting import with_parent
from kimi_backend.hosting.embedded_server import EVERY_HOST, LOCAL_HOST

API_KEY_VARIABLE = "KIMI_API_KEY"
"""Not an option: a command line is no place for a secret."""
NAMES_VARIABLE = "KIMI_OPENAI_NAMES"
"""Names of the endpoint, separated by commas (`kimi_openai.own_names`)."""
_STOP_SLACK_S = 25
"""The endpoint waits so much longer for its streams than the server drains."""


def run_endpoint(
    *, url: str, host: str, port: int, model_names: Sequence[str], splits_thinking: bool, has_chat_page: bool
) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
        ConfigError: its packages are not installed, or no model name is given.
        KimiError: the url has a scheme.
        OSError: the address cannot be taken.
    """
    try:
        import kimi_openai
        from kimi_backend.cli.talk import client_errors
    except ImportError as error:
        raise ConfigError(f"no {error.name}: install the extra, pip install 'kimi-spec-serving[openai]'") from error
    if "" in model_names:
        raise ConfigError("model name: '' given, a name is needed")
    settings = kimi_openai.EndpointSettings(
        url=url,
        model_names=tuple(model_names),
        api_key=os.environ.get(API_KEY_VARIABLE, ""),
        names=tuple(name.strip() for name in os.environ.get(NAMES_VARIABLE, "").split(",") if name.strip()),
        splits_thinking=splits_thinking,
        has_chat_page=has_chat_page,
        stop_within_s=_STOP_SLACK_S + round(ServingSettings.from_parameters({}, os.environ).drain_timeout_s),
    )
    with client_errors():
        kimi_openai.serve(settings, host=host, port=port, say=Console(stderr=True, highlight=False).print)


def start_beside(*, grpc_port: int, host: str, port: int) -> subprocess.Popen[bytes]:
    """The same as a process of its own, which ends with this one, however it ends.

    Args:
        host: address that the server listens on, and the endpoint then.
    """
    server_host = LOCAL_HOST if host == EVERY_HOST else host
    kimi = [sys.executable, "-m", "kimi_backend.cli.main"]
    options = [f"--url={server_host}:{grpc_port}", f"--host={host}", f"--port={port}"]
    return subprocess.Popen([sys.executable, "-S", with_parent.__file__, str(os.getpid()), *kimi, "openai", *options])
