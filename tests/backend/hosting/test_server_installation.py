"""An interpreter that cannot run the embedded server is told what it lacks."""

import subprocess
import sys
from pathlib import Path

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


def test_without_a_pythonpath_models_run_on_this_interpreter(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert server_installation.python_folder(tmp_path) == Path(sys.executable).parent


def test_packages_of_a_pythonpath_are_found_by_an_interpreter_that_reads_none(tmp_path, monkeypatch):
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "found_by_path.py").touch()
    monkeypatch.setenv("PYTHONPATH", "modules")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "modules", *sys.path])
    python = server_installation.python_folder(tmp_path) / "python3"
    subprocess.run([python, "-I", "-c", "import found_by_path, numpy"], cwd="/", check=True)
