"""The processes of a server's models: Triton Server's Python backend runs each model in a stub of its own."""

import os
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_STUB = b"triton_python_backend_stub"
_SERVER = b"tritonserver"
_ENDED = ("Z", "X")


@dataclass(frozen=True, slots=True)
class Stub:
    """One model's process, told from a later one of the same id by when it started."""

    model: str
    pid: int
    start_ticks: str

    @property
    def state(self) -> str:
        """Its letter in /proc, such as T of a stopped process; empty once it has ended, waited for or not."""
        fields = _stat(self.pid)
        return "" if len(fields) < 20 or fields[19] != self.start_ticks or fields[0] in _ENDED else fields[0]

    @property
    def is_orphan(self) -> bool:
        """True if its server has died."""
        fields = _stat(self.pid)
        try:
            return _SERVER not in (_PROC / fields[1] / "cmdline").read_bytes().split(b"\0")[0]
        except (OSError, IndexError):
            return True


def find_stubs(shm_prefix: str) -> list[Stub]:
    """The stubs of the server whose shared-memory regions have this prefix."""
    found = []
    for entry in os.scandir(_PROC):
        if not entry.name.isdigit():
            continue
        try:
            command = (_PROC / entry.name / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if _STUB not in command[0] or not any(shm_prefix.encode() in part for part in command[1:]):
            continue
        fields = _stat(int(entry.name))
        paths = [part.decode() for part in command if part.endswith(b"/model.py")]
        if paths and len(fields) > 19 and fields[0] not in _ENDED:
            found.append(Stub(Path(paths[0]).parent.parent.name, int(entry.name), fields[19]))
    return found


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none where there is no such process."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []
