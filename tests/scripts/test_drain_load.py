"""The load of the drain's measurement: kinds, lengths and ends of its streams, and a disk that is filled."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import drain
import full_shm
import kill_matrix


def test_streams_of_every_kind_end_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def run_stream(*given: Any) -> tuple[Any, ...]:
        asked.append(given)
        return given

    def how_it_ends(stream: tuple[Any, ...], begin: Any) -> str:
        begin()
        return drain.WHOLE if stream[0] != "HTTP" else drain.CUT_OFF

    monkeypatch.setattr(drain, "run_stream", run_stream)
    monkeypatch.setattr(drain, "how_it_ends", how_it_ends)
    load = drain.Load({"grpc": 1}, 100, max_retries=2)
    load.start(6, repeats=False)
    for thread in load.threads:
        thread.join()
    asked.sort(key=lambda given: given[2])
    kinds = ["gRPC", "HTTP", "endpoint"] * 2
    lengths = [60, 80, 100, 120, 140, 60]
    assert asked == [
        (kind, {"grpc": 1}, f"tell {number}", length, 2)
        for number, (kind, length) in enumerate(zip(kinds, lengths, strict=True))
    ]
    assert (load.num_begun, load.count(drain.WHOLE), load.count(drain.CUT_OFF)) == (6, 4, 2)
    assert load.last_end_s > 0
    load.is_over.set()
    load._run("gRPC", 0, True)
    assert load.num_begun == 7


def test_regions_are_set_aside_when_every_page_is_there(tmp_path: Path) -> None:
    assert not full_shm.are_set_aside(tmp_path)
    (tmp_path / "kimi_a").write_bytes(b"x" * 8192)
    (tmp_path / "other").touch()
    assert full_shm.are_set_aside(tmp_path)
    with (tmp_path / "kimi_b").open("wb") as file:
        file.truncate(1 << 20)
    assert not full_shm.are_set_aside(tmp_path)


def test_a_disk_is_filled_but_for_a_mebibyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=full_shm.LEFT_BYTES + 4096)
    monkeypatch.setattr(full_shm.shutil, "disk_usage", lambda folder: usage)
    full_shm.fill(tmp_path)
    assert (tmp_path / "filler").stat().st_size == 4096


def test_sixteen_streams_run_beside_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kill_matrix, "run_stream", lambda kind, *_: kind)
    monkeypatch.setattr(kill_matrix, "how_it_ends", lambda kind, begin: (begin(), f"{kind} whole: said")[1])
    served: Any = SimpleNamespace(ports={})
    streams = kill_matrix.Streams(served)
    for number, kind in enumerate(kill_matrix.CLIENTS):
        streams._run_one(number, kind)
    assert streams.num_begun == len(streams.ends) == 16
    assert streams.ends[0][1] == "gRPC: gRPC whole"
