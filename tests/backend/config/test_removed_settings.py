"""A setting that is gone and still given fails by its name, wherever it is given; a former name of one is read."""

import subprocess
import sys
import typing

import pytest

from kimi_backend.config.known_variables import warnings_of_unknown
from kimi_backend.config.removed_settings import FORMER_NAMES, REMOVED_SETTINGS, REMOVED_VALUES
from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ConfigError


@pytest.mark.parametrize("name", REMOVED_SETTINGS)
def test_it_is_named_with_what_to_do_instead(name: str) -> None:
    instead = REMOVED_SETTINGS[name]
    with pytest.raises(ConfigError) as caught:
        ServingSettings.from_parameters({name: "x"}, {})
    assert str(caught.value) == f"setting {name} was removed: {instead}"
    variable = f"KIMI_{name.upper()}"
    with pytest.raises(ConfigError) as caught:
        ServingSettings.from_parameters({}, {variable: "x"})
    assert str(caught.value) == f"setting {variable} was removed: {instead}"


@pytest.mark.parametrize("name", REMOVED_SETTINGS)
def test_an_empty_one_is_not_given(name: str) -> None:
    """Compose and files of variables leave a setting empty that nobody sets."""
    assert ServingSettings.from_parameters({name: ""}, {f"KIMI_{name.upper()}": ""}) == ServingSettings()


@pytest.mark.parametrize(("name", "former"), FORMER_NAMES.items())
def test_a_former_name_is_read_behind_the_present_one(name: str, former: str) -> None:
    default, other = typing.cast("tuple[str, str]", ServingSettings.__dataclass_fields__[name].metadata["choices"])
    variable = f"KIMI_{former.upper()}"
    for parameters, environment in (({former: other}, {}), ({}, {variable: other}), ({name: ""}, {variable: other})):
        assert getattr(ServingSettings.from_parameters(parameters, environment), name) == other
    assert getattr(ServingSettings.from_parameters({former: other, name: default}, {}), name) == default
    assert warnings_of_unknown([variable]) == []


@pytest.mark.parametrize(("name", "value"), REMOVED_VALUES)
def test_a_value_is_named_with_what_to_write_instead(name: str, value: str) -> None:
    message = f"^setting {name}: '{value}' was removed: write 'plain'"
    with pytest.raises(ConfigError, match=message):
        ServingSettings.from_parameters({name: value}, {})
    with pytest.raises(ConfigError, match=message):
        ServingSettings.from_parameters({}, {f"KIMI_{name.upper()}": value})
    ServingSettings.from_parameters({name: "plain"}, {})


def test_none_is_a_setting_still() -> None:
    assert not any(hasattr(ServingSettings(), name) for name in REMOVED_SETTINGS)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"KIMI_MPS": "off"}, "setting KIMI_MPS was removed"),
        ({"KIMI_BLOCK_SIZE": "17"}, "setting block_size: 17 given"),
        ({"KIMI_MPS": "", "KIMI_BLOCK_SIZE": "16"}, "setting checkpoint: empty"),
    ],
)
def test_the_start_script_asks_as_a_program(variables: dict[str, str], said: str) -> None:
    command = [sys.executable, "-m", "kimi_backend.cli.preflight"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stdout[: len(said)]) == (2, said)
