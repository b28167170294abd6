"""Typed access to the fields of a config.json: every refusal names the field, what was found and what is allowed."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_backend.config.regular_files import read_regular_text
from kimi_backend.errors import ConfigError

MAX_INTEGER = 2**31 - 1
_MAX_NUMBER = 1e30
_SHOWN_CHARS = 200

JsonObject = Mapping[str, Any]
JsonSource = JsonObject | str | Path
"""Parsed JSON, or the path of the file or of the checkpoint folder that holds it."""


def load_json_object(source: JsonSource, file_name: str = "config.json") -> JsonObject:
    """The JSON object in `source`; a folder means its `file_name`.

    Raises:
        ConfigError: there is no such file, or it does not hold a JSON object.
    """
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    if path.is_dir() and path.name != file_name:
        path = path / file_name
    try:
        value = json.loads(read_regular_text(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; expected a checkpoint folder or its {file_name}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (ValueError, RecursionError) as error:  # ValueError: an integer of more digits than Python converts
        raise ConfigError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a JSON {type(value).__name__}, expected an object")
    return value


def describe_source(source: JsonSource, name: str, file_name: str = "config.json") -> str:
    """The name of `source` in messages: its path where it has one."""
    if isinstance(source, Mapping):
        return name
    return str(Path(source) / file_name if Path(source).is_dir() else source)


@dataclass(frozen=True, slots=True)
class JsonFields:
    """The fields of one JSON object. A field that is null counts as absent.

    It remembers which fields were read, so that `config.known_fields` can say what becomes of the others.
    """

    data: JsonObject
    path: str
    """The object's place, as messages show it: "config.json", "config.json text_config", …"""
    warnings: list[str] = field(default_factory=list, compare=False, repr=False)
    """The warnings that the reader of this file must be told; shared with the objects inside."""
    _read: set[str] = field(default_factory=set, init=False, compare=False, repr=False)
    _nested: dict[str, "JsonFields"] = field(default_factory=dict, init=False, compare=False, repr=False)

    def error(self, field: str, allowed: str) -> ConfigError:
        """The refusal of the field's present value."""
        found = f"is {shown(self.data[field])}" if field in self.data else "is missing"
        return ConfigError(f"{self.path}: {field} {found}, expected {allowed}")

    def warn(self, text: str) -> None:
        self.warnings.append(f"{self.path}: {text}")

    def value(self, field: str) -> Any:
        """The field as it stands, None when it is absent; it counts as read."""
        self._read.add(field)
        return self.data.get(field)

    def unread(self) -> list[tuple["JsonFields", str]]:
        """Each field that is not null and was never read, with the object that holds it."""
        own = [(self, name) for name, value in self.data.items() if value is not None and name not in self._read]
        return own + [item for nested in self._nested.values() for item in nested.unread()]

    def has(self, field: str) -> bool:
        return self.data.get(field) is not None

    def optional_integer(self, field: str, minimum: int = 1, maximum: int = MAX_INTEGER) -> int | None:
        """An integer in minimum…maximum, or None when the field is absent."""
        value = self.value(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            is_above = isinstance(value, int) and value > maximum
            limit = f" and at most {maximum}" if is_above or maximum != MAX_INTEGER else ""
            raise self.error(field, f"an integer of at least {minimum}{limit}")
        return value

    def integer(self, field: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        """Do what `optional_integer` does; an absent field takes the default, or is refused where there is none."""
        value = self.optional_integer(field, minimum, maximum)
        if value is None:
            value = default
        if value is None:
            raise self.error(field, f"an integer of at least {minimum}")
        return value

    def number(self, field: str, default: float | None = None, *, above: float = 0.0, or_equal: bool = False) -> float:
        """A finite number greater than `above` (or equal to it, with `or_equal`)."""
        value = self.value(field)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_in_range(value, above, or_equal):
            raise self.error(field, f"a finite number {'of at least' if or_equal else 'above'} {above:g}")
        return float(value)

    def boolean(self, field: str, default: bool) -> bool:
        value = self.value(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(field, "true or false")
        return value

    def choice(self, field: str, allowed: Sequence[str], default: str | None = None) -> str:
        """One of the allowed strings; an absent field takes the default, or is refused where there is none."""
        value = self.value(field)
        if value is None:
            value = default
        if not isinstance(value, str) or value not in allowed:
            raise self.error(field, " or ".join(repr(choice) for choice in allowed))
        return value

    def require(self, field: str, *supported: Any, takes: str = "") -> None:
        """Refuse the field unless it is absent or one of the supported values (of the same type).

        Args:
            takes: what serving another value would take, for the message.
        """
        value = self.value(field)
        if value is None:
            return
        if not any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in supported):
            allowed = " or ".join(repr(choice) for choice in supported) or "null"
            reason = f"another value takes {takes}" if takes else "nothing else is supported"
            raise self.error(field, f"{allowed} ({reason})")

    def integers(self, field: str, *, minimum: int = 0, maximum: int = MAX_INTEGER) -> tuple[int, ...]:
        """A list of integers in minimum…maximum, or a lone integer; empty when the field is absent."""
        value = self.value(field)
        if value is None:
            return ()
        items = value if isinstance(value, list | tuple) else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int) or not minimum <= item <= maximum:
                raise self.error(field, f"integers from {minimum} to {maximum}")
        return tuple(items)

    def strings(self, field: str) -> tuple[str, ...]:
        """A list of strings; empty when the field is absent."""
        value = self.value(field)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.error(field, "a list of strings")
        return tuple(value)

    def object(self, field: str) -> "JsonFields | None":
        """The nested object, or None when the field is absent."""
        value = self.value(field)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(field, "an object")
        return self._nested.setdefault(field, JsonFields(value, f"{self.path} {field}", self.warnings))


def shown(value: object) -> str:
    """The value as Python writes it; what would fill a screen is cut in its middle."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = _SHOWN_CHARS
    short.maxlist = short.maxtuple = short.maxdict = 16
    return short.repr(value)


def _is_in_range(value: float, above: float, or_equal: bool) -> bool:
    """False for NaN too."""
    return above < value < _MAX_NUMBER or (or_equal and value == above)
