"""Memory that two processes of one user share: one makes it, the other opens it by a handle.

A handle names a file descriptor of its owner. Whatever that is by the time it is opened, it is mapped only if it is
what the owner made: an anonymous file of the same size, sealed so that it never shrinks under a mapping, with the
handle's random token at its start.
"""

import fcntl
import hmac
import json
import mmap
import os
import secrets
import stat
from dataclasses import asdict, dataclass

_NAME = "kimi_semaphores"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
TOKEN_BYTES = 32
"""The length of the token at the memory's start."""


class SealedMemoryError(Exception):
    """There is no such memory, or not any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHandle:
    """The handle by which another process of this user opens the memory."""

    process_id: int
    descriptor: int
    num_bytes: int
    token: str
    """The token in hexadecimal digits."""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> "MemoryHandle":
        """Raises SealedMemoryError: it is none. Says nothing of what it holds."""
        try:
            handle = cls(**json.loads(text))
        except (ValueError, TypeError):
            raise SealedMemoryError("its handle cannot be read") from None
        numbers = (handle.process_id, handle.descriptor, handle.num_bytes)
        if not all(type(number) is int and number >= 0 for number in numbers) or not isinstance(handle.token, str):
            raise SealedMemoryError("its handle cannot be read")
        return handle


class OwnMemory:
    """The owner's end: zeros behind the token."""

    def __init__(self, num_bytes: int) -> None:
        """Raises SealedMemoryError: no memory to share."""
        try:
            self._descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._descriptor, num_bytes)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.memory = mmap.mmap(self._descriptor, num_bytes)
        except (OSError, ValueError) as error:
            raise SealedMemoryError(str(error)) from None
        token = secrets.token_bytes(TOKEN_BYTES)
        self.memory[:TOKEN_BYTES] = token
        self.handle = MemoryHandle(
            process_id=os.getpid(), descriptor=self._descriptor, num_bytes=num_bytes, token=token.hex()
        )

    def close(self) -> None:
        """Nobody can open it any more."""
        os.close(self._descriptor)


def open_memory(handle: MemoryHandle) -> mmap.mmap:
    """Map what a handle names.

    Raises:
        SealedMemoryError: it is not there any more, or is not what `OwnMemory` makes: nothing is mapped then.
    """
    path = f"/proc/{handle.process_id}/fd/{handle.descriptor}"
    try:
        # Before it is opened: to open a pipe or a device may do something.
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise SealedMemoryError("its process has it no more")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _check(descriptor, handle)
            return mmap.mmap(descriptor, handle.num_bytes)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise SealedMemoryError(f"its process has it no more: {type(error).__name__}") from None


def _check(descriptor: int, handle: MemoryHandle) -> None:
    found = os.fstat(descriptor)
    token = os.pread(descriptor, TOKEN_BYTES, 0)
    is_ours = (
        stat.S_ISREG(found.st_mode)
        and found.st_size == handle.num_bytes
        and fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) == _SEALS
        and hmac.compare_digest(token.hex().encode(), handle.token.encode())
    )
    if not is_ours:
        raise SealedMemoryError("its process has something else there")
