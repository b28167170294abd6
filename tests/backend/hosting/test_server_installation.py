"""An interpreter that cannot run the embedded server is told what it lacks."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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


def test_this_interpreters_stub_is_put_in_place_once(tmp_path):
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = tmp_path / "python_backend_stubs" / version / "triton_python_backend_stub"
    stub.parent.mkdir(parents=True)
    stub.write_text("for this one")
    target = tmp_path / "backends" / "python" / stub.name
    target.parent.mkdir(parents=True)
    target.write_text("another's")
    server_installation._place_stub(tmp_path)
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("for this one", 0o755)
    before = target.stat().st_ino
    server_installation._place_stub(tmp_path)
    assert target.stat().st_ino == before
    target.unlink()
    server_installation._place_stub(tmp_path)
    assert [path.name for path in target.parent.iterdir()] == [stub.name]


@pytest.mark.parametrize("below", ["", "x86_64-linux-gnu"])
def test_a_shared_libpython_is_found_where_distributions_put_it(tmp_path, monkeypatch, below):
    values = {"LIBDIR": str(tmp_path), "MULTIARCH": "x86_64-linux-gnu"}
    monkeypatch.setattr(server_installation.sysconfig, "get_config_var", values.__getitem__)
    folder = tmp_path / below
    folder.mkdir(exist_ok=True)
    (folder / f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0").touch()
    assert server_installation._libpython_folder() == folder


def test_the_wheels_server_is_found_beside_its_libraries(tmp_path, monkeypatch):
    spec = SimpleNamespace(origin=str(tmp_path / "pytriton" / "__init__.py"))
    placed = []
    monkeypatch.setattr(server_installation.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(server_installation, "_place_stub", placed.append)
    monkeypatch.setattr(server_installation, "_libpython_folder", lambda: Path("/lib"))
    found = server_installation.find_installation()
    assert found.library_folders == (tmp_path / "nvidia_pytriton.libs", Path("/lib"))
    assert (found.binary, found.backends) == (
        tmp_path / "pytriton/tritonserver/bin/tritonserver",
        tmp_path / "pytriton/tritonserver/backends",
    )
    assert placed == [tmp_path / "pytriton/tritonserver"]
