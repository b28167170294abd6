"""The writer's files are what the safetensors library reads and writes; a large tensor is never held whole."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from kimi_backend.checkpoint import writer
from kimi_backend.checkpoint.new_folder import new_folder
from kimi_backend.checkpoint.safetensors_source import INDEX_FILE, SafetensorsSource
from kimi_backend.checkpoint.tensor_source import InMemoryTensors
from kimi_backend.checkpoint.writer import write_checkpoint
from kimi_backend.errors import CheckpointError

TENSORS = {
    "mask": torch.tensor([True, False, True]),
    "matrix": torch.randn(33, 5),
    "bf16": torch.randn(7, 3).to(torch.bfloat16),
    "half": torch.randn(4).half(),
    "fp8": torch.randn(9, 2).to(torch.float8_e4m3fn),
    "ids": torch.arange(11),
    "codes": torch.arange(12, dtype=torch.int32).reshape(3, 4),
    "empty": torch.empty(0, 4),
}


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found.float(), expected.float())


@pytest.mark.parametrize("shard_bytes", [10**6, 300, 1])
@pytest.mark.parametrize("chunk_bytes", [1 << 25, 16])
def test_the_library_reads_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int, chunk_bytes: int
) -> None:
    monkeypatch.setattr(writer, "_CHUNK_BYTES", chunk_bytes)
    done: list[int] = []
    files = write_checkpoint(
        tmp_path, InMemoryTensors(TENSORS), list(TENSORS), shard_bytes=shard_bytes, advance=done.append
    )
    read = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert read.keys() == TENSORS.keys()
    assert all(same(read[name], tensor) for name, tensor in TENSORS.items())
    assert sum(done) == sum(tensor.nbytes for tensor in TENSORS.values())
    assert len(files) == {10**6: 1, 300: 3, 1: 8}[shard_bytes]
    assert (tmp_path / INDEX_FILE).exists() == (len(files) > 1)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != INDEX_FILE) == sorted(f.name for f in files)
    if len(files) > 1:
        index = json.loads((tmp_path / INDEX_FILE).read_text())
        assert index["metadata"]["total_size"] == sum(done)
        for name, file in index["weight_map"].items():
            with safe_open(tmp_path / file, "pt") as handle:
                assert name in handle.keys()  # noqa: SIM118  the handle is no mapping


def test_every_tensor_begins_at_a_multiple_of_its_element_size(tmp_path: Path) -> None:
    (file,) = write_checkpoint(tmp_path, InMemoryTensors(TENSORS), list(TENSORS))
    content = file.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    assert header_bytes % 8 == 0
    for name, tensor in TENSORS.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0


def test_our_own_source_reads_it_too(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, InMemoryTensors(TENSORS), list(TENSORS), shard_bytes=200)
    source = SafetensorsSource.open(tmp_path)
    assert source.names() == TENSORS.keys()
    assert source.num_bytes() == sum(tensor.nbytes for tensor in TENSORS.values())
    assert all(same(source.read(name), tensor) for name, tensor in TENSORS.items())


def test_names_and_dtypes_may_change_on_the_way(tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path,
        InMemoryTensors(TENSORS),
        ["bf16"],
        stored_name=lambda name: f"language_model.{name}",
        stored_dtype=lambda name, dtype: torch.float32,
    )
    read = load_file(tmp_path / "model.safetensors")
    assert torch.equal(read["language_model.bf16"], TENSORS["bf16"].float())


class MeasuredSource:
    """A large tensor of zeros that notes how much is asked for at once."""

    def __init__(self) -> None:
        self.most_bytes = 0

    def names(self) -> frozenset[str]:
        return frozenset({"large"})

    def shape(self, name: str) -> tuple[int, ...]:
        return (200_000, 300)

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        assert dim == 0
        assert stop is not None
        tensor = torch.zeros(stop - start, 300, dtype=torch.bfloat16)
        self.most_bytes = max(self.most_bytes, tensor.nbytes)
        return tensor


def test_a_large_tensor_goes_through_in_pieces(tmp_path: Path) -> None:
    source = MeasuredSource()
    (file,) = write_checkpoint(tmp_path, source, ["large"])
    assert source.most_bytes <= 1 << 25
    assert file.stat().st_size > 200_000 * 300 * 2


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    class Failing(InMemoryTensors):
        def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
            if name == "matrix":
                raise CheckpointError("source", ["gone"])
            return super().read(name, dim, start, stop)

    with pytest.raises(CheckpointError, match="gone"):
        write_checkpoint(tmp_path, Failing(TENSORS), list(TENSORS))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "deeper" / "out"

    def fill_and_fail() -> None:
        with new_folder(out) as folder:
            (folder / "file").touch()
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        fill_and_fail()
    assert list(out.parent.iterdir()) == []
    out.mkdir()
    with new_folder(out) as folder:
        (folder / "file").touch()
    assert [path.name for path in out.iterdir()] == ["file"]
    with pytest.raises(CheckpointError, match="is there already, expected a new name"), new_folder(out):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is there already"), new_folder(tmp_path / "file"):
        pass
    with pytest.raises(CheckpointError, match="cannot be written"), new_folder(tmp_path / "file" / "out"):
        pass


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written: No such file"):
        write_checkpoint(tmp_path / "absent", InMemoryTensors(TENSORS), list(TENSORS))
