"""Triton Server and its Python backend, as the nvidia-pytriton wheel put them, made ready for this interpreter.

The wheel holds the real tritonserver 2.51. Three things make it run beside a virtual environment: the Python backend
needs the stub built for this interpreter's version, the stub needs this interpreter's shared libpython, and it finds
packages through the `python3` that comes first on the PATH. From Python 3.11 on that stub reads no PYTHONPATH.
"""

import importlib.util
import os
import shutil
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

from kimi_backend.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerInstallation:
    """The place where the wheel put the server, ready to run on this interpreter."""

    tree: Path
    library_folders: tuple[Path, ...]

    @property
    def binary(self) -> Path:
        return self.tree / "bin" / "tritonserver"

    @property
    def backends(self) -> Path:
        return self.tree / "backends"


def find_installation() -> ServerInstallation:
    """Locate the embedded server and put this interpreter's stub in place.

    Raises:
        ConfigError: the wheel, the stub for this Python or a shared libpython is missing; says what to do.
    """
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "the embedded Triton Server is not installed: run `pip install nvidia-pytriton==0.7.0` (Linux x86-64), "
            "use the container (docker/), or `kimi demo --in-process`, which needs no server"
        )
    package = Path(spec.origin).parent
    tree = package / "tritonserver"
    _place_stub(tree)
    return ServerInstallation(tree, (package.parent / "nvidia_pytriton.libs", _libpython_folder()))


def python_folder(scratch: Path) -> Path:
    """Return the folder of a `python3` that finds this process's packages without a PYTHONPATH.

    That is this interpreter's own folder, unless PYTHONPATH is set: then it is a virtual environment's, made in
    `scratch`, with every folder that this process imports from.
    """
    if not os.environ.get("PYTHONPATH"):
        return Path(sys.executable).parent
    environment = scratch / "python"
    venv.create(environment, symlinks=True)
    (packages,) = environment.glob("lib/python3*/site-packages")
    (packages / "packages.pth").write_text("".join(f"{Path(path).resolve()}\n" for path in sys.path if path))
    return environment / "bin"


def _place_stub(tree: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = tree / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        offered = ", ".join(sorted(p.name for p in (tree / "python_backend_stubs").glob("3.*")))
        raise ConfigError(f"the embedded server has no stub for Python {version}; it has them for {offered}")
    target = tree / "backends" / "python" / stub.name
    if target.exists() and target.stat().st_size == stub.stat().st_size:
        return
    # Written beside and renamed: another server may be starting from the same installation.
    partial = target.with_suffix(f".{os.getpid()}")
    shutil.copy(stub, partial)
    partial.chmod(0o755)
    partial.replace(target)


def _libpython_folder() -> Path:
    folder = Path(sysconfig.get_config_var("LIBDIR"))
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    multiarch = folder / str(sysconfig.get_config_var("MULTIARCH") or "")
    for candidate in (folder, multiarch):
        if (candidate / name).exists():
            return candidate
    raise ConfigError(
        f"the server's Python backend needs {name}, which this interpreter ({sys.executable}) was built without: "
        f"use a distribution's python3 with its libpython package, or a build with --enable-shared"
    )
