"""Reading files: one, sharded, with and without their index; slices; prefixes; what a text server leaves out."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from kimi_backend.checkpoint import safetensors_source
from kimi_backend.checkpoint.safetensors_source import INDEX_FILE, SafetensorsSource
from kimi_backend.errors import CheckpointError

MATRIX = torch.arange(60, dtype=torch.float32).reshape(6, 10)


@pytest.fixture(scope="module")
def matrix_source(tmp_path_factory: pytest.TempPathFactory) -> SafetensorsSource:
    folder = tmp_path_factory.mktemp("matrix")
    save_file(
        {
            "language_model.model.a": MATRIX,
            "model.b": MATRIX.to(torch.float8_e4m3fn),
            "vision_tower.c": MATRIX.clone(),
            "mm_projector.proj.0.weight": MATRIX.clone(),
        },
        folder / "model.safetensors",
    )
    return SafetensorsSource.open(folder)


@given(dim=st.integers(0, 1), bounds=st.tuples(st.integers(0, 10), st.integers(0, 10)), name=st.sampled_from("ab"))
def test_slices_of_either_dimension(
    matrix_source: SafetensorsSource, dim: int, bounds: tuple[int, int], name: str
) -> None:
    size = MATRIX.shape[dim]
    start, stop = sorted(min(bound, size) for bound in bounds)
    found = matrix_source.read(f"model.{name}", dim, start, stop)
    assert torch.equal(found.float(), MATRIX.to(found.dtype).float().narrow(dim, start, stop - start))


def test_prefixes_go_and_vision_stays_out(matrix_source: SafetensorsSource) -> None:
    assert matrix_source.names() == {"model.a", "model.b"}
    assert matrix_source.shape("model.a") == (6, 10)
    assert matrix_source.dtype("model.b") is torch.float8_e4m3fn
    assert matrix_source.num_bytes() == 60 * 4 + 60


@pytest.mark.parametrize(("dim", "start", "stop"), [(0, 0, 7), (1, -1, 3), (1, 5, 4), (1, 11, None)])
def test_a_slice_outside_the_tensor_is_refused(
    matrix_source: SafetensorsSource, dim: int, start: int, stop: int | None
) -> None:
    with pytest.raises(CheckpointError, match=rf"model\.a: elements {start}:.* of dimension {dim} of \[6, 10\]"):
        matrix_source.read("model.a", dim, start, stop)


def test_a_file_may_be_opened_by_itself(tmp_path: Path) -> None:
    save_file({"a": MATRIX}, tmp_path / "weights.safetensors")
    assert SafetensorsSource.open(tmp_path / "weights.safetensors").names() == {"a"}
    assert SafetensorsSource.open(str(tmp_path)).names() == {"a"}


def test_shards_need_no_index(tmp_path: Path) -> None:
    for i, name in enumerate("abc"):
        save_file({name: MATRIX + i}, tmp_path / f"model-{i + 1:05d}-of-00003.safetensors")
    without = SafetensorsSource.open(tmp_path)
    weight_map = {name: f"model-{i + 1:05d}-of-00003.safetensors" for i, name in enumerate("abc")}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with_index = SafetensorsSource.open(tmp_path)
    for source in (without, with_index):
        assert source.names() == {"a", "b", "c"}
        assert torch.equal(source.read("b"), MATRIX + 1)


def test_all_problems_of_all_files_are_in_one_error(tmp_path: Path) -> None:
    names = [f"model-{i}-of-00004.safetensors" for i in range(1, 5)]
    save_file({"a": MATRIX}, tmp_path / names[0])
    (tmp_path / names[1]).write_bytes(b"not a safetensors file")
    truncated = (tmp_path / names[0]).read_bytes()[:-5]
    (tmp_path / names[2]).write_bytes(truncated)
    index = {"weight_map": {"a": names[0], "b": names[1], "c": names[2], "d": names[3], "e": names[0]}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        SafetensorsSource.open(tmp_path)
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 4
    assert f"{names[1]}: cannot be read as safetensors" in text
    assert f"{names[2]}: cannot be read as safetensors" in text
    assert f"{names[3]} is listed in {INDEX_FILE} but absent" in text
    assert f"tensor 'e' is listed in {names[0]}, found in no file" in text


def test_one_tensor_under_two_prefixes_is_refused(tmp_path: Path) -> None:
    save_file({"language_model.lm_head.weight": MATRIX, "lm_head.weight": MATRIX + 1}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="are the same one, expected one of them"):
        SafetensorsSource.open(tmp_path)


def test_a_pipe_for_an_index_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / INDEX_FILE)
    with pytest.raises(CheckpointError, match=r"index\.json: cannot be read \(is no regular file\)"):
        SafetensorsSource.open(tmp_path)


@pytest.mark.parametrize("num_files", [1, 300_000])
def test_a_damaged_index_of_many_names_is_refused_soon(num_files: int, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "f0.safetensors")
    weight_map = {f"model.layers.{i}.x": f"f{i % num_files}.safetensors" for i in range(300_000)}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    start = time.thread_time()
    with pytest.raises(CheckpointError) as error:
        SafetensorsSource.open(tmp_path)
    assert time.thread_time() - start < 10, "seconds; it takes one"
    assert len(str(error.value)) < 20_000
    assert ("names 300000 files" in str(error.value)) is (num_files > 1)
    assert ("... 299940 more ..." in str(error.value)) is (num_files == 1)


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    for path, message in {
        tmp_path / "weights.bin": "weights.bin is a file, expected a checkpoint folder",
        tmp_path / "none": "no such folder",
        tmp_path: "holds no .safetensors file, expected model.safetensors or shards",
    }.items():
        with pytest.raises(CheckpointError) as caught:
            SafetensorsSource.open(path)
        assert len(caught.value.problems) == 1
        assert message in caught.value.problems[0]


def test_what_a_later_version_names_otherwise_is_found(tmp_path: Path) -> None:
    save_file({"model.language_model.layers.0.x": MATRIX}, tmp_path / "model.safetensors")
    assert SafetensorsSource.open(tmp_path).names() == {"model.layers.0.x"}


def test_a_missing_tensor_a_foreign_dtype_and_a_file_that_shrank_are_named(tmp_path: Path) -> None:
    save_file({"a": MATRIX, "b": torch.ones(2, dtype=torch.complex64)}, tmp_path / "model.safetensors")
    source = SafetensorsSource.open(tmp_path)
    with pytest.raises(CheckpointError, match="tensor 'c' is missing"):
        source.shape("c")
    with pytest.raises(CheckpointError, match="b: dtype C64, expected one of"):
        source.dtype("b")
    os.truncate(tmp_path / "model.safetensors", 200)
    with pytest.raises(CheckpointError, match=r"a: cannot be read \(the file has become shorter\)"):
        source.read("a")


def test_columns_are_read_a_few_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": MATRIX}, tmp_path / "model.safetensors")
    source, seen = SafetensorsSource.open(tmp_path), list[int]()
    monkeypatch.setattr(safetensors_source, "_COLUMN_BYTES", 4 * 40)
    read = safetensors_source._OpenFile.read

    def watched(file: Any, num_bytes: int, offset: int) -> torch.Tensor:
        seen.append(num_bytes)
        return read(file, num_bytes, offset)

    monkeypatch.setattr(safetensors_source._OpenFile, "read", watched)
    assert torch.equal(source.read("a", 1, 2, 5), MATRIX[:, 2:5])
    assert seen == [4 * 40, 4 * 20]
