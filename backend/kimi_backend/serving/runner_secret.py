"""The secret by which a runner knows its one caller.

Triton Server lets every client call every model that it has loaded, so a plan could come from anybody. Whoever starts a
server writes a random secret to a file that only its own user may read, and names the file in the environment that the
models' processes inherit. Each call of a runner carries the secret as an input; nothing else of a call is looked at
before it was compared.
"""

import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kimi_backend.errors import ConfigError, InvalidRequestError
from kimi_backend.serving import tensor_names as names

SECRET_BYTES = 32
SECRET_FILE_VARIABLE = "KIMI_RUNNER_SECRET_FILE"
_FILE_NAME = "runner_secret"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def write_secret(folder: Path) -> Path:
    """Write a new secret into a folder; returns its file, which no other user may read."""
    path = folder / _FILE_NAME
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, secrets.token_bytes(SECRET_BYTES))
    finally:
        os.close(descriptor)
    return path


def read_secret(environment: Mapping[str, str]) -> bytes:
    """The secret of the server whose child process this is.

    Raises:
        ConfigError: no file is named, or it is none that a server's start has written. Never shows what it holds.
    """
    name = environment.get(SECRET_FILE_VARIABLE, "")
    if not name:
        raise ConfigError(
            f"{SECRET_FILE_VARIABLE}: empty, a file of {SECRET_BYTES} random bytes is needed that only this user may "
            "read; `kimi serve` and docker/start.sh write one"
        )
    try:
        with open(name, "rb") as file:
            mode, secret = os.fstat(file.fileno()).st_mode, file.read(SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{SECRET_FILE_VARIABLE}: {name} given, which cannot be read: {error.strerror}") from None
    if mode & _OTHERS:
        raise ConfigError(f"{SECRET_FILE_VARIABLE}: {name} given, which others may read; mode 0600 is needed")
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"{SECRET_FILE_VARIABLE}: {name} given, which does not hold {SECRET_BYTES} bytes")
    return secret


def secret_tensor(pb_utils: Any, secret: bytes) -> Any:
    """The input that a call of a runner carries."""
    import numpy as np  # whoever starts a server writes the secret and needs no arrays

    return pb_utils.Tensor(names.SECRET, np.frombuffer(secret, np.uint8))


class Doorkeeper:
    """Lets a runner's own orchestrator in, and nobody else."""

    def __init__(self, pb_utils: Any, secret: bytes) -> None:
        self._pb = pb_utils
        self._secret = secret

    def check(self, request: Any) -> None:
        """Pass silently if the request carries the secret. Takes as long for any other bytes.

        Raises:
            InvalidRequestError: it does not; says nothing of what it carries.
        """
        tensor = self._pb.get_input_tensor_by_name(request, names.SECRET)
        given = b"" if tensor is None or not tensor.is_cpu() else tensor.as_numpy().tobytes()
        if not hmac.compare_digest(given, self._secret):
            raise InvalidRequestError("this model answers spec_ensemble alone; send requests there")
