"""One engine at a time over a server's runners."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from kimi_backend.errors import ModelUnavailableError
from kimi_backend.serving.engine_lock import EngineLock, lock_of_this_server
from support.waiting import PATIENCE_S


def test_a_newcomer_gets_the_lock_when_its_holder_has_left(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = EngineLock(path), EngineLock(path)
    first.acquire(0)
    assert not first.is_wanted
    with pytest.raises(ModelUnavailableError, match="still ends its requests"):
        second.acquire(0.05)
    assert first.is_wanted
    assert not second.is_wanted
    threading.Timer(0.1, first.release).start()
    second.acquire(PATIENCE_S)
    assert not second.is_wanted
    assert not first.is_wanted
    second.release()
    assert not path.exists()


def test_acquiring_and_releasing_may_be_repeated(tmp_path: Path) -> None:
    lock = EngineLock(tmp_path / "lock")
    lock.release()
    for _ in range(3):
        lock.acquire(0)
        lock.acquire(0)
        lock.release()
        lock.release()


def test_a_process_that_dies_releases_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom kimi_backend.serving.engine_lock import EngineLock\n"
        f"lock = EngineLock(Path({str(path)!r}))\nlock.acquire(0)\nprint('taken', flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "taken\n"
        lock = EngineLock(path)
        with pytest.raises(ModelUnavailableError, match="another"):
            lock.acquire(0.05)
        holder.kill()
    lock.acquire(PATIENCE_S)
    lock.release()


def test_never_two_hold_it_though_many_come_and_go(tmp_path: Path) -> None:
    """Each releases it, and removes the file, as soon as it is asked to."""
    path, inside, worst = tmp_path / "lock", 0, 0
    stop_s = time.monotonic() + 1.0

    def come_and_go() -> None:
        nonlocal inside, worst
        while time.monotonic() < stop_s:
            lock = EngineLock(path)
            try:
                lock.acquire(0.2)
            except ModelUnavailableError:
                continue
            inside += 1
            worst = max(worst, inside)
            time.sleep(0.002)
            inside -= 1
            lock.release()

    threads = [threading.Thread(target=come_and_go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worst == 1


def test_another_servers_lock_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = lock_of_this_server()
    monkeypatch.setattr("os.getppid", os.getpid)
    second = lock_of_this_server()
    first.acquire(0)
    second.acquire(0)
    first.release()
    second.release()


def test_what_a_killed_server_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living = lock_of_this_server()
    living.acquire(0)
    (name,) = tmp_path.iterdir()
    user, server, started = name.stem.rsplit("_", 3)[1:]
    earlier = tmp_path / f"kimi_spec_ensemble_{user}_{server}_{int(started) - 1}.lock"
    others = tmp_path / f"kimi_spec_ensemble_{int(user) + 1}_{server}_{int(started) - 1}.lock"
    odd = tmp_path / f"kimi_spec_ensemble_{user}_a_b.lock"
    for path in (earlier, others, odd):
        path.touch()
    lock_of_this_server()
    assert set(tmp_path.iterdir()) == {name, others, odd}
    living.release()
