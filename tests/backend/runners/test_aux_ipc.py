"""The aux buffer across two processes that know nothing of each other but the handle."""

import hashlib
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from kimi_backend.errors import InvalidRequestError
from kimi_backend.runners import aux_ipc
from kimi_backend.runners.aux_buffer import AuxBuffer
from kimi_backend.runners.aux_ipc import AuxBufferHandle, OpenedAuxBuffer, export_aux_buffer
from kimi_backend.runners.cuda_ipc import CudaIpcError
from kimi_backend.types.plan import AuxHandle

# Reads handles from its input, one a line; says what each region holds, byte for byte, when asked.
READER = """
import hashlib, json, sys, torch
from kimi_backend.runners.aux_ipc import OpenedAuxBuffer
from kimi_backend.types.plan import AuxHandle

opened = OpenedAuxBuffer(bytes.fromhex(sys.stdin.readline()), torch.device("cuda", 0))
for line in sys.stdin:
    rows = opened.buffer.resolve(AuxHandle(region=int(line)))
    given = rows.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    print(json.dumps([list(rows.shape), str(rows.dtype), hashlib.sha256(given).hexdigest()]), flush=True)
opened.close()
print("closed", flush=True)
"""


def as_told(rows: torch.Tensor) -> list[object]:
    """The reader's answer for rows that it sees as they are here."""
    given = rows.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return [list(rows.shape), str(rows.dtype), hashlib.sha256(given).hexdigest()]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_another_process_reads_the_same_bytes_step_after_step(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    before = torch.zeros(3_000_001, dtype=torch.uint8, device=device)  # so that the buffer begins inside an allocation
    buffer = AuxBuffer.allocate(2, 257, 3 * 192, dtype, device)
    arguments = [sys.executable, "-c", READER]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        print(export_aux_buffer(buffer).hex(), file=reader.stdin, flush=True)
        for step in range(6):
            region = buffer.take_region()
            buffer.region(region).copy_(torch.randn(257, 3 * 192, device=device))
            torch.cuda.synchronize()
            print(region, file=reader.stdin, flush=True)
            assert json.loads(reader.stdout.readline()) == as_told(buffer.region(region)), f"step {step}"
        reader.stdin.close()
        assert reader.stdout.read().strip() == "closed"
    del before


@pytest.mark.gpu
def test_a_buffer_of_another_gpu_is_refused() -> None:
    buffer = AuxBuffer.allocate(1, 4, 8, torch.float32, torch.device("cuda"))
    handle = AuxBufferHandle.from_bytes(export_aux_buffer(buffer))
    foreign = AuxBufferHandle(
        memory=handle.memory, offset=handle.offset, shape=handle.shape, dtype=handle.dtype, device="GPU-other"
    )
    with pytest.raises(CudaIpcError, match="GPU-other"):
        OpenedAuxBuffer(foreign.to_bytes(), torch.device("cuda"))


@pytest.mark.gpu
def test_a_handle_whose_owner_is_gone_is_refused() -> None:
    buffer = AuxBuffer.allocate(1, 4, 8, torch.float32, torch.device("cuda"))
    handle = AuxBufferHandle.from_bytes(export_aux_buffer(buffer))
    stale = AuxBufferHandle(
        memory=bytes(64).hex(), offset=handle.offset, shape=handle.shape, dtype=handle.dtype, device=handle.device
    )
    with pytest.raises(CudaIpcError, match="cuIpcOpenMemHandle"):
        OpenedAuxBuffer(stale.to_bytes(), torch.device("cuda"))


def test_a_handle_survives_its_bytes() -> None:
    handle = AuxBufferHandle(memory="00" * 64, offset=512, shape=(2, 16, 576), dtype="bfloat16", device="GPU-1")
    assert AuxBufferHandle.from_bytes(handle.to_bytes()) == handle


@pytest.mark.parametrize("text", [b"", b"{}", b'{"memory": 1}', b"\xff", b"[]"])
def test_bytes_that_are_no_handle_are_refused(text: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="aux buffer's handle"):
        AuxBufferHandle.from_bytes(text)


def test_a_region_that_is_not_there_is_refused() -> None:
    buffer = AuxBuffer.allocate(2, 4, 8, torch.float32, torch.device("cpu"))
    for region in (None, -1, 2):
        with pytest.raises(InvalidRequestError, match=r"plan aux\.region"):
            buffer.resolve(AuxHandle(region=region))


def test_only_a_contiguous_buffer_of_regions_is_one() -> None:
    for tensor in (torch.zeros(2, 3), torch.zeros(2, 3, 4).transpose(1, 2)):
        with pytest.raises(
            ValueError, match=r"aux buffer of shape .*: a contiguous \[num_regions, rows, width\] needed"
        ):
            AuxBuffer(tensor)


class HostMemory:
    """Memory of this process in place of another's."""

    def __init__(self, handle: bytes, offset: int, num_bytes: int, device: torch.device) -> None:
        self.opened = (handle, offset, num_bytes, device)
        self.is_closed = False

    def tensor(self) -> torch.Tensor:
        return torch.arange(self.opened[2], dtype=torch.uint8)

    def close(self) -> None:
        self.is_closed = True


def test_what_was_exported_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's calls are made up, and so is its memory."""
    monkeypatch.setattr(aux_ipc, "export_memory", lambda tensor: (b"handle", 512))
    monkeypatch.setattr(aux_ipc, "OpenedMemory", HostMemory)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    cpu = torch.device("cpu")
    exported = export_aux_buffer(AuxBuffer.allocate(2, 3, 4, torch.bfloat16, cpu))
    opened = OpenedAuxBuffer(exported, cpu)
    memory: Any = opened._memory
    assert memory.opened == (b"handle", 512, 48, cpu)
    assert (opened.exported, opened.buffer.dtype) == (exported, torch.bfloat16)
    assert torch.equal(opened.buffer.tensor.view(torch.uint8).flatten(), memory.tensor())
    assert opened.buffer.tensor.shape == (2, 3, 4)
    opened.close()
    assert memory.is_closed


@pytest.mark.parametrize(
    ("device", "dtype", "error", "message"),
    [
        ("GPU-1", "float32", CudaIpcError, "the target's buffer is on GPU-1, the draft on cpu"),
        ("cpu", "int8", InvalidRequestError, "aux buffer's dtype: int8 given, bfloat16, float16, float32 are allowed"),
    ],
)
def test_a_buffer_of_another_place_or_kind_is_not_opened(
    device: str, dtype: str, error: type[Exception], message: str
) -> None:
    handle = AuxBufferHandle(memory="00", offset=0, shape=(1, 2, 3), dtype=dtype, device=device)
    with pytest.raises(error, match=message):
        OpenedAuxBuffer(handle.to_bytes(), torch.device("cpu"))
