"""The processes of a server's models, read from a /proc of the test's own."""

from pathlib import Path

import pytest

from kimi_backend.hosting import stubs
from kimi_backend.hosting.stubs import Stub, find_stubs

STUB = ["/x/triton_python_backend_stub", "/repo/kimi_target/1/model.py", "kimi_8000_1"]


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(stubs, "_PROC", tmp_path)
    return tmp_path


def add(proc: Path, pid: int, command: list[str], *, state: str = "S", parent: int = 1, start: int = 700) -> None:
    """A process whose name has a blank and a bracket."""
    (proc / str(pid)).mkdir(exist_ok=True)
    (proc / str(pid) / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in command))
    fields = [state, str(parent), *map(str, range(5, 22)), str(start), "23"]
    (proc / str(pid) / "stat").write_text(f"{pid} (a b) c) {' '.join(fields)}\n")


def test_the_stubs_of_one_server_are_found(proc: Path) -> None:
    add(proc, 20, STUB)
    add(proc, 21, ["/x/triton_python_backend_stub", "/repo/kimi_target/1/model.py", "kimi_8001_1"])
    add(proc, 22, ["/bin/tail", "/repo/kimi_target/1/model.py", "kimi_8000_1"])
    add(proc, 23, STUB, state="Z")
    add(proc, 24, ["/x/triton_python_backend_stub", "kimi_8000_1"])
    (proc / "25").mkdir()
    (proc / "26").mkdir()
    (proc / "26" / "cmdline").write_bytes(b"\0".join(word.encode() for word in STUB))
    (proc / "self").mkdir()
    assert find_stubs("kimi_8000_") == [Stub("kimi_target", 20, "700")]


def test_a_stubs_state_is_its_own_and_not_a_later_processs(proc: Path) -> None:
    stub = Stub("kimi_target", 20, "700")
    assert stub.state == ""
    for state, seen in {"S": "S", "T": "T", "Z": "", "X": ""}.items():
        add(proc, 20, STUB, state=state)
        assert stub.state == seen
    add(proc, 20, STUB, start=701)
    assert stub.state == ""
    (proc / "20" / "stat").write_text("20 (a) S 1")
    assert stub.state == ""


def test_a_stub_whose_server_has_died_is_an_orphan(proc: Path) -> None:
    stub = Stub("kimi_target", 20, "700")
    assert stub.is_orphan
    add(proc, 20, STUB, parent=10)
    assert stub.is_orphan
    add(proc, 10, ["/x/bin/tritonserver", "--http-port=8000"])
    assert not stub.is_orphan
    add(proc, 10, ["/sbin/init", "tritonserver"])
    assert stub.is_orphan
