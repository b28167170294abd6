"""Settings -> the embedded server that serves them."""

import dataclasses
from pathlib import Path

import kimi_backend
from kimi_backend.config.settings import ENVIRONMENT_PREFIX, ServingSettings
from kimi_backend.errors import ConfigError
from kimi_backend.hosting.embedded_server import LOCAL_HOST, MODELS, EmbeddedServer, ServerPorts


def find_model_repository() -> Path:
    """The model repository: inside the installed package, or beside it in a checkout.

    Raises:
        ConfigError: neither is there.
    """
    package = Path(kimi_backend.__file__).parent
    for folder in (package / "model_repository", package.parents[1] / "model_repository"):
        if folder.is_dir():
            return folder
    raise ConfigError(f"no model repository beside {package}; name one with --model-repository")


def settings_as_environment(settings: ServingSettings) -> dict[str, str]:
    """Variables that make the models read these settings."""
    return {ENVIRONMENT_PREFIX + f.name.upper(): str(getattr(settings, f.name)) for f in dataclasses.fields(settings)}


def models_to_load(settings: ServingSettings) -> tuple[str, ...]:
    """All models, but not the draft's where there is none, nor the unary twin unless it is asked for."""
    is_loaded = {"eagle3_draft": bool(settings.draft), "spec_ensemble_unary": settings.unary == "true"}
    return tuple(name for name in MODELS if is_loaded.get(name, True))


def make_server(
    settings: ServingSettings,
    *,
    ports: ServerPorts | None = None,
    host: str = LOCAL_HOST,
    model_repository: Path | None = None,
    log_file: Path | None = None,
    ends_with_parent: bool = False,
    options: tuple[str, ...] = (),
) -> EmbeddedServer:
    """An embedded server over these settings, not started yet.

    Args:
        host, ends_with_parent: see `EmbeddedServer`.

    Raises:
        ConfigError: no checkpoint is named, or the server is not installed.
    """
    if not settings.checkpoint:
        raise ConfigError("setting checkpoint: empty, a checkpoint's folder is needed (--checkpoint)")
    return EmbeddedServer(
        model_repository or find_model_repository(),
        ports=ports,
        host=host,
        environment=settings_as_environment(settings),
        log_file=log_file,
        models=models_to_load(settings),
        exit_timeout_s=max(1, round(settings.drain_timeout_s)),
        ends_with_parent=ends_with_parent,
        options=options,
    )
