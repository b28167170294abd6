"""The secret's file, and a runner's door."""

import stat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kimi_backend.errors import ConfigError, InvalidRequestError
from kimi_backend.serving.runner_secret import (
    SECRET_BYTES,
    SECRET_FILE_VARIABLE,
    Doorkeeper,
    read_secret,
    secret_tensor,
    write_secret,
)
from support import fake_pb_utils

SECRET = bytes(range(SECRET_BYTES))


def test_a_start_writes_a_new_secret_that_only_its_user_reads(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    paths = [write_secret(folder) for folder in folders]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    secrets = {read_secret({SECRET_FILE_VARIABLE: str(path)}) for path in paths}
    assert {len(secret) for secret in secrets} == {SECRET_BYTES}
    assert len(secrets) == 2


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (SECRET, 0o640, "others may read"),
        (SECRET[:-1], 0o600, "does not hold 32 bytes"),
        (SECRET + b"\n", 0o600, "does not hold 32 bytes"),
        (None, 0o600, "cannot be read"),
    ],
    ids=["readable", "short", "long", "missing"],
)
def test_a_file_that_is_none_stops_the_model_and_is_not_shown(
    tmp_path: Path, content: bytes | None, mode: int, said: str
) -> None:
    path = tmp_path / "runner_secret"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=said):
        read_secret({SECRET_FILE_VARIABLE: str(path)})


def test_a_server_that_was_started_otherwise_is_told_what_writes_the_secret() -> None:
    with pytest.raises(ConfigError, match=r"KIMI_RUNNER_SECRET_FILE: empty, .* `kimi serve` and docker/start.sh"):
        read_secret({})


@pytest.mark.parametrize(
    "given",
    [
        None,
        np.zeros(0, np.uint8),
        np.zeros(SECRET_BYTES, np.uint8),
        np.frombuffer(SECRET[:-1], np.uint8),
        np.frombuffer(SECRET * 2, np.uint8),
        np.array([SECRET], np.object_),
    ],
    ids=["none", "empty", "other", "short", "long", "object"],
)
def test_the_door_opens_for_the_secret_alone(given: "np.ndarray[object, np.dtype[np.uint8]] | None") -> None:
    door = Doorkeeper(fake_pb_utils, SECRET)
    tensors = [] if given is None else [fake_pb_utils.Tensor("SECRET", given)]
    with pytest.raises(InvalidRequestError, match=r"^this model answers spec_ensemble alone"):
        door.check(SimpleNamespace(inputs=lambda: tensors))
    door.check(SimpleNamespace(inputs=lambda: [secret_tensor(fake_pb_utils, SECRET)]))
