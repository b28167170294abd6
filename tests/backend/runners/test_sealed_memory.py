"""Only what the owner made is mapped, whatever a handle names."""

import dataclasses
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kimi_backend.runners.sealed_memory import TOKEN_BYTES, MemoryHandle, OwnMemory, SealedMemoryError, open_memory

SIZE = 8192


@pytest.fixture
def own() -> Iterator[OwnMemory]:
    memory = OwnMemory(SIZE)
    yield memory
    memory.close()


def test_both_ends_see_the_same_bytes(own: OwnMemory) -> None:
    opened = open_memory(MemoryHandle.from_bytes(own.handle.to_bytes()))
    opened[100:103] = b"abc"
    assert own.memory[100:103] == b"abc"
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(own.handle.descriptor, 0)


def test_a_file_that_the_user_has_open_is_neither_mapped_nor_written(tmp_path: Path) -> None:
    """Nor is one that begins with the token that the handle gives."""
    before = bytes(range(TOKEN_BYTES)) + bytes(SIZE - TOKEN_BYTES)
    path = tmp_path / "victim"
    path.write_bytes(before)
    with path.open("r+b") as file:
        handle = MemoryHandle(
            process_id=os.getpid(), descriptor=file.fileno(), num_bytes=SIZE, token=before[:TOKEN_BYTES].hex()
        )
        with pytest.raises(SealedMemoryError):
            open_memory(handle)
    assert path.read_bytes() == before


def test_a_pipe_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening one would let its other end's process go on."""
    reader, writer = os.pipe()
    monkeypatch.setattr(os, "open", lambda path, *_: pytest.fail(f"{path} was opened"))
    try:
        with pytest.raises(SealedMemoryError):
            open_memory(MemoryHandle(process_id=os.getpid(), descriptor=reader, num_bytes=SIZE, token="00"))
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK])
def test_memory_that_may_shrink_under_the_mapping_is_refused(seals: int) -> None:
    descriptor = os.memfd_create("kimi_semaphores", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, SIZE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        token = bytes(TOKEN_BYTES).hex()
        with pytest.raises(SealedMemoryError, match="something else"):
            open_memory(MemoryHandle(process_id=os.getpid(), descriptor=descriptor, num_bytes=SIZE, token=token))
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("change", [{"token": "ab"}, {"num_bytes": 4096}, {"descriptor": 9999}, {"process_id": 2**22}])
def test_a_handle_that_does_not_fit_is_refused(own: OwnMemory, change: dict[str, object]) -> None:
    with pytest.raises(SealedMemoryError):
        open_memory(dataclasses.replace(own.handle, **change))  # type: ignore[arg-type]


def test_nothing_is_opened_when_its_owner_has_closed_it() -> None:
    memory = OwnMemory(SIZE)
    memory.close()
    with pytest.raises(SealedMemoryError):
        open_memory(memory.handle)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"process_id": "../1", "descriptor": 1, "num_bytes": 8, "token": ""}',
        b'{"process_id": 1, "descriptor": true, "num_bytes": 8, "token": "secret bytes"}',
    ],
    ids=["empty", "list", "fields", "no text", "path", "no number"],
)
def test_bytes_that_are_no_handle_are_refused_without_being_quoted(text: bytes) -> None:
    with pytest.raises(SealedMemoryError, match=r"^its handle cannot be read$"):
        MemoryHandle.from_bytes(text)
