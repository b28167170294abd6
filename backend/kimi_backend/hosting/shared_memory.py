"""/dev/shm, where the server's processes share memory: enough of it at the start, and a watch on what is left.

`python -m kimi_backend.hosting.shared_memory NUM_MODELS REGION_BYTES` asks for the first: where there is too little it
says so on stdout, with exit code 2.

Triton Server 24.10 copies a request there before any code of this project sees it. Where a region cannot grow the
request is refused; a write into a page that the file system cannot give ends the server.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from kimi_backend.errors import ConfigError

SHM_FOLDER = Path("/dev/shm")
MIB = 2**20
REGION_BYTES = 32 * MIB
"""First size of each model's region: room for a request of 16 MiB, which is copied, and for what is under way."""
SPARE_BYTES = 64 * MIB
"""Room beside the regions, for those that grow."""
LOW_BYTES = 32 * MIB
"""Less than this free is told."""
_TOLD_EVERY_S = 60.0


def check_shared_memory(
    num_models: int, folder: Path = SHM_FOLDER, region_bytes: int = REGION_BYTES, spare_bytes: int = SPARE_BYTES
) -> None:
    """Fail early where the server's processes could not share memory.

    Raises:
        ConfigError: /dev/shm is missing or too full.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is missing; Triton Server's Python backend shares memory through it")
    free, needed = shutil.disk_usage(folder).free, num_models * region_bytes + spare_bytes
    if free < needed:
        raise ConfigError(
            f"{folder} has {free // MIB} MiB free, {needed // MIB} MiB are needed: remove stale "
            f"kimi_* files there, or start the container with a larger --shm-size"
        )


def sweep_regions(prefix: str, folder: Path = SHM_FOLDER) -> list[str]:
    """Remove the shared-memory regions that a server with this prefix left behind; returns their names."""
    removed = []
    for region in folder.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)
        removed.append(region.name)
    return removed


class SharedMemoryWatch:
    """Has the file system set aside the pages of a server's regions, and tells when little room is left.

    Regions are sparse files until they are written: what was set aside is not lost to whoever fills the rest.
    """

    def __init__(self, prefix: str, say: Callable[[str], None], folder: Path = SHM_FOLDER) -> None:
        self._prefix = prefix
        self._say = say
        self._folder = folder
        self._reserved: dict[str, int] = {}
        self._told_at: float | None = None

    def look(self, now: float) -> None:
        """Once a second or so."""
        for region in self._folder.glob(f"{self._prefix}*"):
            with contextlib.suppress(OSError):  # it is gone, or there is no room, which is told below
                self._reserve(region)
        free = shutil.disk_usage(self._folder).free
        if free >= LOW_BYTES:
            if self._told_at is not None:
                self._say(f"{self._folder} has {free // MIB} MiB free again")
            self._told_at = None
        elif self._told_at is None or now - self._told_at >= _TOLD_EVERY_S:
            self._told_at = now
            self._say(
                f"{self._folder} has {free // MIB} MiB free: a request that needs more is refused, or ends the server;"
                " find what fills it, or give it more (--shm-size)"
            )

    def _reserve(self, region: Path) -> None:
        size = region.stat().st_size
        if size <= self._reserved.get(region.name, 0):
            return
        descriptor = os.open(region, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)
        self._reserved[region.name] = size


def main() -> int:
    try:
        check_shared_memory(int(sys.argv[1]), region_bytes=int(sys.argv[2]))
    except ConfigError as error:
        sys.stdout.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
