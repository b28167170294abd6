"""A misspelt KIMI_* variable is told, with the name that was meant; one that something reads is not. Every setting
keeps the bounds that it declares."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from kimi_backend.config.known_variables import warnings_of_unknown
from kimi_backend.config.removed_settings import REMOVED_VALUES
from kimi_backend.config.settings import ServingSettings, describe_allowed
from kimi_backend.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def test_a_misspelt_variable_is_told_with_the_near_name() -> None:
    (line,) = warnings_of_unknown(["KIMI_MAX_NUM_SEQ", "KIMI_DRAFT", "HOME"])
    assert line == "warning: the variable KIMI_MAX_NUM_SEQ is not known, nothing reads it: KIMI_MAX_NUM_SEQS?"
    assert warnings_of_unknown(["KIMI_ZZZZZZZZZZ"])[0].endswith("nothing reads it")


def test_every_variable_of_the_deployment_is_known() -> None:
    files = [ROOT / "docker/start.sh", ROOT / "docker/compose.yaml", ROOT / "docker/.env.example"]
    files += [path for folder in ("backend", "client") for path in (ROOT / folder).rglob("*.py")]
    names = {name for path in files for name in re.findall(r"\bKIMI_[A-Z0-9_]*[A-Z0-9]\b", path.read_text())}
    assert len(names) > 40
    assert warnings_of_unknown(names - {"KIMI_X", "KIMI_NAME", "KIMI_K25"}) == []


FIELDS = {field.name: field for field in dataclasses.fields(ServingSettings)}
BOUNDED = [name for name, field in FIELDS.items() if {"minimum", "maximum", "choices"} & field.metadata.keys()]


def read(name: str, value: Any) -> Any:
    """A setting, as it is read from a variable; beside a draft, which some proposers need."""
    environment = {"KIMI_DRAFT": "a folder", "KIMI_MAX_SPECULATIVE_TOKENS": "7", f"KIMI_{name.upper()}": str(value)}
    return getattr(ServingSettings.from_parameters({}, environment), name)


@pytest.mark.parametrize("name", BOUNDED)
def test_a_setting_keeps_its_bounds(name: str) -> None:
    bounds, is_whole = FIELDS[name].metadata, isinstance(FIELDS[name].default, int)
    step = 1 if is_whole else 1e-7
    for value in bounds.get("choices", ()):
        assert value == "" or read(name, value) == value
    if "choices" in bounds:
        with pytest.raises(ConfigError, match=f"^setting {name}: .*99.* given, one of "):
            read(name, 99)
    if "minimum" in bounds:
        assert read(name, bounds["minimum"]) == bounds["minimum"]
        with pytest.raises(ConfigError, match=f"^setting {name}: .* given, at least {bounds['minimum']} is allowed"):
            read(name, bounds["minimum"] - step)
    if "minimum" in bounds and not is_whole:
        with pytest.raises(ConfigError, match=f"^setting {name}: nan given, at least {bounds['minimum']} is allowed"):
            read(name, "nan")
    if "maximum" in bounds:
        assert read(name, bounds["maximum"]) == bounds["maximum"]
        with pytest.raises(ConfigError, match=f"^setting {name}: .* given, at most {bounds['maximum']} is allowed"):
            read(name, bounds["maximum"] + step)


def test_bounds_are_said_to_readers() -> None:
    allowed = {name: describe_allowed(field) for name, field in FIELDS.items()}
    assert allowed["block_size"] == "`16`, `32`, `64`, `128`"
    assert allowed["draft_fc_norm"] == "empty, `true`, `false`"
    assert (allowed["num_speculative_tokens"], allowed["kv_tokens"], allowed["draft"]) == ("0 to 7", "≥ 0", "text")
    assert all(value not in FIELDS[name].metadata["choices"] for name, value in REMOVED_VALUES)


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("synthetic_acceptance", ("0", "1", "8"), ("0.01", "0.99")),
        ("synthetic_chances", ("0", "0,1", "1,0.5,0"), ("1.01", "0.5,-0.01", "-0.01,0.5", "0.5,x")),
    ],
)
def test_synthetic_acceptance_is_what_can_be(name: str, allowed: tuple[str, ...], refused: tuple[str, ...]) -> None:
    for value in allowed:
        read(name, value)
    for value in refused:
        with pytest.raises(ConfigError, match=f"^setting {name}: "):
            read(name, value)
