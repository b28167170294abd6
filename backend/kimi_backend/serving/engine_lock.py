"""One engine at a time over a server's runners.

While Triton Server unloads a model it lets the requests that run end, and another model of that name may be loaded and
serve meanwhile. Two engines over the same runners would write each other's KV blocks. So an engine needs a lock, on
a file that goes with the server's process. A newcomer asks for it, and whoever holds it ends its requests first.
"""

import contextlib
import fcntl
import os
import secrets
import tempfile
import threading
import time
from pathlib import Path

from kimi_backend.errors import ModelUnavailableError
from kimi_backend.processes import start_ticks

POLL_S = 0.02
_PREFIX = "kimi_spec_ensemble_"
_NAME_BYTES = 16


def lock_of_this_server() -> "EngineLock":
    """The engine lock of the server whose child process this is."""
    folder, server = Path(tempfile.gettempdir()), os.getppid()
    _sweep(folder)
    return EngineLock(folder / f"{_PREFIX}{os.getuid()}_{server}_{start_ticks(server)}.lock")


def _sweep(folder: Path) -> None:
    """Remove what servers that were killed have left."""
    for path in folder.glob(f"{_PREFIX}{os.getuid()}_*.lock"):
        server, started = path.stem.rsplit("_", 2)[1:]
        if server.isdecimal() and start_ticks(int(server)) != started:
            with contextlib.suppress(OSError):  # gone already, or not ours in spite of its name
                path.unlink()


class EngineLock:
    """Held from `acquire` to `release`; the process's end releases it too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._name = secrets.token_hex(_NAME_BYTES // 2).encode()
        self._file: int | None = None
        self._lock = threading.Lock()
        """The lock of the file's number: one thread looks whether the engine lock is wanted, another releases it."""

    def acquire(self, timeout_s: float) -> None:
        """Ask for the lock and wait until it is free; it is this one's afterwards.

        Raises:
            ModelUnavailableError: another engine still holds it.
        """
        deadline_s = time.monotonic() + timeout_s
        while self._file is None:
            try:
                self._file = self._try_to_acquire()
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    message = "another spec_ensemble of this server, which is unloaded, still ends its requests"
                    raise ModelUnavailableError(message) from None
                time.sleep(POLL_S)

    def _try_to_acquire(self) -> int:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(file, self._name, 0)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever left may have removed the file that was opened here.
            if os.fstat(file).st_ino != os.stat(self._path).st_ino:
                raise BlockingIOError
        except FileNotFoundError:
            os.close(file)
            raise BlockingIOError from None
        except OSError:
            os.close(file)
            raise
        return file

    @property
    def is_wanted(self) -> bool:
        """Tell whether another engine has asked for the lock that this one holds."""
        with self._lock:
            return self._file is not None and os.pread(self._file, _NAME_BYTES, 0) != self._name

    def release(self) -> None:
        """Free it, if it is held. Nothing of this engine may call a runner afterwards."""
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                self._path.unlink(missing_ok=True)
                os.close(file)
