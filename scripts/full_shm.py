"""Serves a checkpoint, fills /dev/shm, sends large bodies, and prints what became of them and of the server as JSON.

    unshare --mount --map-root-user sh -c 'mount -t tmpfs -o size=256m tmpfs /dev/shm
        && exec python scripts/full_shm.py demo/kimi-nano'

Never over the machine's own /dev/shm: it ends whatever else runs there.
"""

import http.client
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from served_load import serving, wait

LEFT_BYTES = 2**20
SET_ASIDE_WITHIN_S = 30.0


def are_set_aside(folder: Path) -> bool:
    """Tell whether the file system holds every page of the regions: the watchdog asks for them."""
    sizes = [path.stat() for path in folder.glob("kimi_*")]
    return len(sizes) > 0 and all(size.st_blocks * 512 >= size.st_size for size in sizes)


def fill(folder: Path) -> None:
    descriptor = os.open(folder / "filler", os.O_CREAT | os.O_RDWR)
    os.posix_fallocate(descriptor, 0, shutil.disk_usage(folder).free - LEFT_BYTES)
    os.close(descriptor)


def post(port: int, text: str, max_tokens: int) -> str:
    body = json.dumps({"text_input": text, "max_tokens": max_tokens})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/v2/models/spec_ensemble/generate", body)
        reply = connection.getresponse()
        reply.read()
        return str(reply.status)
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, serving(Path(sys.argv[1]), Path(folder)) as served:
        wait(lambda: are_set_aside(Path("/dev/shm")), SET_ASIDE_WITHIN_S)
        fill(Path("/dev/shm"))
        port = served.ports["http"]
        large = [post(port, "word " * (num_mb * 200_000), 1) for num_mb in (1, 12, 12, 40, 12)]
        small = [post(port, "hi", 4) for _ in range(3)]
        found = {"large": large, "small": small, "code": served.process.poll(), "log": served.log.read_text()[-2000:]}
        sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
