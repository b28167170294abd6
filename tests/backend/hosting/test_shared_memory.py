"""Room in /dev/shm: asked for at the start, set aside for regions, told when it is little."""

import os
import sys
from types import SimpleNamespace

import pytest

from kimi_backend.errors import ConfigError
from kimi_backend.hosting import shared_memory
from kimi_backend.hosting.shared_memory import LOW_BYTES, MIB, SharedMemoryWatch, check_shared_memory, sweep_regions


def test_only_regions_of_the_prefix_are_swept(tmp_path):
    for name in ("kimi_8000_a", "kimi_8000_b", "kimi_80001", "other"):
        (tmp_path / name).write_text("x")
    assert sorted(sweep_regions("kimi_8000_", tmp_path)) == ["kimi_8000_a", "kimi_8000_b"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kimi_80001", "other"]


def test_too_little_of_it_says_so(tmp_path):
    check_shared_memory(3, tmp_path, region_bytes=1, spare_bytes=1)
    with pytest.raises(ConfigError, match=f"MiB free, {3 * 2**40 + 5} MiB are needed"):
        check_shared_memory(3, tmp_path, region_bytes=2**60, spare_bytes=5 * MIB)
    with pytest.raises(ConfigError, match="is missing"):
        check_shared_memory(3, tmp_path / "none")


def test_a_sparse_region_gets_its_pages_again_when_it_grows(tmp_path):
    region, other = tmp_path / "kimi_1_a", tmp_path / "kimi_2_a"
    for path in (region, other):
        with path.open("wb") as file:
            file.truncate(2 * MIB)
    watch = SharedMemoryWatch("kimi_1_", lambda line: None, tmp_path)
    watch.look(0.0)
    assert region.stat().st_blocks * 512 >= 2 * MIB
    assert other.stat().st_blocks == 0
    os.truncate(region, 4 * MIB)
    watch.look(1.0)
    assert region.stat().st_blocks * 512 >= 4 * MIB


def test_little_room_is_told_once_a_minute(tmp_path, monkeypatch):
    free, said = LOW_BYTES - MIB, list[str]()
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    watch = SharedMemoryWatch("kimi_1_", said.append, tmp_path)
    for second in range(100):
        watch.look(float(second))
    assert len(said) == 2
    assert said[0].startswith(
        f"{tmp_path} has {LOW_BYTES // MIB - 1} MiB free: a request that needs more is refused, or ends the server"
    )
    free = LOW_BYTES
    watch.look(101.0)
    watch.look(102.0)
    assert said[2:] == [f"{tmp_path} has {LOW_BYTES // MIB} MiB free again"]


@pytest.mark.parametrize(("region_bytes", "code", "said"), [("1", 0, ""), (str(2**60), 2, "MiB are needed")])
def test_the_start_script_is_told_on_stdout(monkeypatch, capsys, region_bytes, code, said):
    usage = SimpleNamespace(free=shared_memory.SPARE_BYTES + 2**20)
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(sys, "argv", ["shared_memory", "3", region_bytes])
    assert shared_memory.main() == code
    out = capsys.readouterr().out
    assert said in out and bool(out) is bool(said)
