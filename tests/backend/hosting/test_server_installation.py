"""An interpreter that cannot run the embedded server is told what it lacks."""

import pytest

from kimi_backend.errors import ConfigError
from kimi_backend.hosting import server_installation


def test_without_the_wheel_the_message_names_the_ways_out(monkeypatch):
    monkeypatch.setattr(server_installation.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"nvidia-pytriton.*kimi demo --in-process"):
        server_installation.find_installation()


def test_an_interpreter_without_a_stub_is_told_which_have_one(tmp_path):
    (tmp_path / "python_backend_stubs" / "3.8").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"it has them for 3\.8"):
        server_installation._place_stub(tmp_path)


def test_a_static_interpreter_is_told_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(server_installation.sysconfig, "get_config_var", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match=r"libpython3\.\d+\.so\.1\.0"):
        server_installation._libpython_folder()
