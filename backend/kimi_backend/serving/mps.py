"""The CUDA MPS daemon, for a target and a draft that take turns on one GPU.

Two processes on a GPU cost about 0.15 ms for each change of turn; clients of an MPS daemon do not. In return a kernel
that faults ends all clients, and then both runners are loaded again.

    python -m kimi_backend.serving.mps start FOLDER      0: running, prints what its clients' environment needs;
                                                         3: not here, the reason is said
    python -m kimi_backend.serving.mps stop FOLDER
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from kimi_backend.serving.processes import is_alive

CONTROL = "nvidia-cuda-mps-control"
NOT_RUNNING = 3
VISIBLE = "CUDA_VISIBLE_DEVICES"
_START_S = 10.0
_PROBE_S = 30.0
_STOP_S = 10.0
_POLL_S = 0.05
_MAX_SOCKET_PATH = 90

# The daemon starts its server with the first client, and a server that cannot work fails that client: so ask for a
# context once, in a process that may die of it.
_PROBE = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
code = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
raise SystemExit(code or cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device))
"""

Environment = Mapping[str, str]


class MpsUnavailable(Exception):
    """MPS cannot be used here; says why. Serving goes on without it."""


def _folders(folder: Path) -> dict[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}


def _renumbered(environment: Environment) -> dict[str, str]:
    """The GPUs as a daemon's clients count them: from 0, those that the daemon was started with. Names stay names."""
    visible = [name for name in environment.get(VISIBLE, "").split(",") if name]
    if not all(name.strip().isdigit() for name in visible):
        return {}
    return {VISIBLE: ",".join(map(str, range(len(visible))))} if visible else {}


def client_works(environment: Environment) -> bool:
    """Whether a process with this environment gets a context on the first GPU that it sees."""
    command = [sys.executable, "-c", _PROBE]
    try:
        return subprocess.run(command, env=environment, timeout=_PROBE_S, capture_output=True).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def start_mps(
    folder: Path, environment: Environment, probe: Callable[[Environment], bool] = client_works
) -> dict[str, str]:
    """Start a daemon of one's own, whose pipes and log are in `folder`, and see a client work.

    Args:
        environment: of this process; the GPUs that it sees are the daemon's.

    Returns:
        What a process must have in its environment to be a client.

    Raises:
        MpsUnavailable: no daemon runs when this is raised.
    """
    program = shutil.which(CONTROL, path=environment.get("PATH"))
    if program is None:
        raise MpsUnavailable(f"{CONTROL} is not on the PATH")
    if "CUDA_MPS_PIPE_DIRECTORY" in environment:
        raise MpsUnavailable("CUDA_MPS_PIPE_DIRECTORY is set: the daemon that it names is used")
    if len(str(folder)) > _MAX_SOCKET_PATH:
        raise MpsUnavailable(f"{folder} is too long a path for a socket")
    for name in _folders(folder).values():
        Path(name).mkdir(parents=True, exist_ok=True)
    daemon = {**environment, **_folders(folder)}
    try:
        done = subprocess.run([program, "-d"], env=daemon, timeout=_START_S, capture_output=True, text=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        stop_mps(folder, environment)
        raise MpsUnavailable(f"{CONTROL} did not start: {error}") from None
    if done.returncode:
        raise MpsUnavailable(f"{CONTROL} ended with code {done.returncode}: {(done.stderr or done.stdout).strip()}")
    variables = {**_folders(folder), **_renumbered(environment)}
    if not probe({**environment, **variables}):
        stop_mps(folder, environment)
        raise MpsUnavailable("a first client did not get a context")
    return variables


def stop_mps(folder: Path, environment: Environment) -> None:
    """End the daemon of this folder, its clients being gone or not wanted any more. Harmless where none runs."""
    daemon = _daemon_pid(folder)
    if daemon is None:
        return
    program = shutil.which(CONTROL, path=environment.get("PATH")) or CONTROL
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [program],
            input="quit -t 2\n",
            env={**environment, **_folders(folder)},
            timeout=_STOP_S,
            capture_output=True,
            text=True,
        )
    deadline = time.monotonic() + _STOP_S / 2
    while is_alive(daemon) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if is_alive(daemon):
        os.kill(daemon, signal.SIGKILL)


def _daemon_pid(folder: Path) -> int | None:
    try:
        return int((folder / "pipe" / "nvidia-cuda-mps-control.pid").read_text())
    except (OSError, ValueError):
        return None


def main(arguments: list[str]) -> int:
    """`start FOLDER` or `stop FOLDER`, for the start script."""
    action, folder = arguments[0], Path(arguments[1])
    if action == "stop":
        stop_mps(folder, os.environ)
        return 0
    try:
        variables = start_mps(folder, os.environ)
    except MpsUnavailable as problem:
        sys.stderr.write(f"without MPS: {problem}\n")
        return NOT_RUNNING
    sys.stdout.write("".join(f"{name}={value}\n" for name, value in variables.items()))
    sys.stderr.write("with MPS: target and draft share the GPU without changing contexts\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
