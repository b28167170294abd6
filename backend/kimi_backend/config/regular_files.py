"""Reading the small files of a checkpoint: regular files only, and no more than they may hold."""

import os
import stat
from pathlib import Path

MAX_FILE_BYTES = 1 << 28
"""Well above any config, index, tokenizer or template; a file beyond it would fill the memory."""


def read_regular_file(path: Path) -> bytes:
    """The bytes of a regular file.

    Raises:
        OSError: it cannot be read, or is a pipe, a device or a folder, which would keep the reader waiting or never
            end, or holds more than MAX_FILE_BYTES; `strerror` says it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "is no regular file", str(path))
        if status.st_size > MAX_FILE_BYTES:
            raise OSError(0, f"is larger than {MAX_FILE_BYTES >> 20} MiB", str(path))
        return stream.read(MAX_FILE_BYTES)


def read_regular_text(path: Path) -> str:
    """Do what `read_regular_file` does, and decode it.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_regular_file(path).decode("utf-8")
