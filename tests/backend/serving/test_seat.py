"""One engine at a time over a server's runners."""

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from kimi_backend.errors import ModelUnavailableError
from kimi_backend.serving.seat import Seat, seat_of_this_server


def test_a_newcomer_gets_the_seat_when_its_holder_has_left(tmp_path: Path) -> None:
    path = tmp_path / "seat"
    first, second = Seat(path), Seat(path)
    first.take(0)
    assert not first.is_wanted
    with pytest.raises(ModelUnavailableError, match="still ends its requests"):
        second.take(0.05)
    assert first.is_wanted
    assert not second.is_wanted
    threading.Timer(0.1, first.leave).start()
    second.take(5)
    assert not second.is_wanted
    assert not first.is_wanted
    second.leave()
    assert not path.exists()


def test_taking_and_leaving_may_be_repeated(tmp_path: Path) -> None:
    seat = Seat(tmp_path / "seat")
    seat.leave()
    for _ in range(3):
        seat.take(0)
        seat.take(0)
        seat.leave()
        seat.leave()


def test_a_process_that_dies_leaves_the_seat(tmp_path: Path) -> None:
    path = tmp_path / "seat"
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom kimi_backend.serving.seat import Seat\n"
        f"seat = Seat(Path({str(path)!r}))\nseat.take(0)\nprint('taken', flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "taken\n"
        seat = Seat(path)
        with pytest.raises(ModelUnavailableError, match="another"):
            seat.take(0.05)
        holder.kill()
    seat.take(5)
    seat.leave()


def test_never_two_hold_it_though_many_come_and_go(tmp_path: Path) -> None:
    """Each leaves, and removes the file, as soon as it is asked to."""
    path, inside, worst = tmp_path / "seat", 0, 0
    stop_s = time.monotonic() + 1.0

    def come_and_go() -> None:
        nonlocal inside, worst
        while time.monotonic() < stop_s:
            seat = Seat(path)
            try:
                seat.take(0.2)
            except ModelUnavailableError:
                continue
            inside += 1
            worst = max(worst, inside)
            time.sleep(0.002)
            inside -= 1
            seat.leave()

    threads = [threading.Thread(target=come_and_go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worst == 1


def test_another_servers_seat_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = seat_of_this_server()
    monkeypatch.setattr("os.getppid", lambda: 1)
    second = seat_of_this_server()
    first.take(0)
    second.take(0)
    first.leave()
    second.leave()


def test_what_a_killed_server_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living = seat_of_this_server()
    living.take(0)
    (name,) = tmp_path.iterdir()
    user, server, started = name.stem.rsplit("_", 3)[1:]
    earlier = tmp_path / f"kimi_spec_ensemble_{user}_{server}_{int(started) - 1}.seat"
    others = tmp_path / f"kimi_spec_ensemble_{int(user) + 1}_{server}_{int(started) - 1}.seat"
    odd = tmp_path / f"kimi_spec_ensemble_{user}_a_b.seat"
    for path in (earlier, others, odd):
        path.touch()
    seat_of_this_server()
    assert set(tmp_path.iterdir()) == {name, others, odd}
    living.leave()
