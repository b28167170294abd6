"""A folder that is there whole or not at all. Without torch, so that a command can refuse at once."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kimi_backend.errors import CheckpointError


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder that appears under `path` only when the block has ended well.

    Raises:
        CheckpointError: something is there already, or the parent cannot be written.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(str(path), ["is there already, expected a new name or an empty folder"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise CheckpointError(str(path), [f"cannot be written: {error.strerror or error}"]) from error
    try:
        yield unfinished
        unfinished.chmod(0o755)
        unfinished.rename(path)  # replaces an empty folder
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
