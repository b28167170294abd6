"""Runs a command over a small /dev/shm of its own, in a mount namespace: nobody else's is filled."""

import shutil
import subprocess

import pytest

_MOUNT = 'mount -t tmpfs -o "size=$0m" tmpfs /dev/shm && exec "$@"'


def in_private_shm(num_mib: int, command: list[str]) -> list[str]:
    """The command that runs another one so; skips the test where namespaces are not allowed."""
    before = ["unshare", "--mount", "--map-root-user", "sh", "-c", _MOUNT, str(num_mib)]
    if shutil.which("unshare") is None or subprocess.run([*before, "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces are not allowed here")
    return [*before, *command]
