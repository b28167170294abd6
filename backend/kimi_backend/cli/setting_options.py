"""Command-line options made of `ServingSettings`: one declaration for variables, options and docs/settings.md."""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kimi_backend.config.settings import ServingSettings, describe_allowed
from kimi_backend.errors import ConfigError

ALIASES = {
    "checkpoint": ("--model",),
    "tensor_parallel_size": ("-tp", "--tp"),
    "num_speculative_tokens": ("-k",),
    "gpu_memory_gib": ("--gpu-memory",),
    "kv_cache_dtype": ("--kv-dtype",),
}
"""Other names of an option: vLLM's where they mean the same and differ (`--model`, `-tp`), and shorter ones."""
NO_OPTIONS = frozenset({"drain_file"})
"""Settings that whoever runs the server makes up."""
_FLAGS = ({"true", "false"}, {"", "true", "false"})
_FOLDERS = ("checkpoint", "draft", "tokenizer")
_PATHS = (*_FOLDERS, "draft_vocab_counts")


def setting_options(
    *, only: Iterable[str] = (), without: Iterable[str] = (), panel: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for every setting; the function gets those that were given as its argument `settings`,
    name -> text.

    Args:
        only: names of settings; by default all.
        without: names to leave out.
        panel: heading over them in `--help`.
    """
    everything = {field.name for field in dataclasses.fields(ServingSettings)}
    chosen = (set(only) or everything) - {*without, *NO_OPTIONS}
    fields = [field for field in dataclasses.fields(ServingSettings) if field.name in chosen]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function).parameters

        @functools.wraps(function)
        def command(**given: Any) -> None:
            values = {field.name: given.pop(field.name) for field in fields}
            texts = {name: _text(value) for name, value in values.items() if value is not None}
            function(settings=texts, **given)

        made = [_option(field, panel) for field in fields]
        kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, p in own.items() if name != "settings"]
        command.__signature__ = inspect.Signature([*kept, *made])  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in (*kept, *made)}
        return command

    return decorate


def _option(field: "dataclasses.Field[Any]", panel: str | None) -> inspect.Parameter:
    name = f"--{field.name.replace('_', '-')}"
    is_flag = set(field.metadata.get("choices", ())) in _FLAGS
    kind: Any = bool if is_flag else typing.get_type_hints(ServingSettings)[field.name]
    option = typer.Option(
        f"{name}/--no-{name[2:]}" if is_flag else name,
        *ALIASES.get(field.name, ()),
        help=f"{field.metadata['effect']} (default: {field.default if field.default != '' else 'empty'})",
        metavar=None if is_flag else f"[{describe_allowed(field).replace('`', '')}]",
        rich_help_panel=panel,
    )
    made: Any = Annotated[kind | None, option]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=made)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_settings(given: Mapping[str, str], environment: Mapping[str, str]) -> ServingSettings:
    """Options over the environment, paths made absolute: the server runs elsewhere.

    Raises:
        ConfigError: a value that is out of range, or a folder that is none.
    """
    settings = ServingSettings.from_parameters(given, environment)
    for name in _FOLDERS:
        folder = getattr(settings, name)
        if folder and not Path(folder).is_dir():
            raise ConfigError(f"setting {name}: {folder} given, which is not a folder")
    paths: dict[str, Any] = {name: str(Path(path).resolve()) for name in _PATHS if (path := getattr(settings, name))}
    return dataclasses.replace(settings, **paths)
