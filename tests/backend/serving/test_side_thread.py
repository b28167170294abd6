"""What runs beside its caller."""

import threading
import time

import pytest

from kimi_backend.serving.side_thread import SideThread


def test_both_have_ended_when_the_block_has() -> None:
    side, said = SideThread("side"), []
    for number in range(3):
        with side.running(lambda number=number: (time.sleep(0.02), said.append((number, threading.get_ident())))):  # type: ignore[misc]
            said.append((number, threading.get_ident()))
    assert [number for number, _ in said] == [0, 0, 1, 1, 2, 2]
    assert len({thread for _, thread in said}) == 2


def test_what_either_raises_is_raised_and_the_thread_lives_on() -> None:
    side = SideThread("side")
    with pytest.raises(ZeroDivisionError), side.running(lambda: 1 // 0):  # type: ignore[arg-type, return-value]
        pass
    with pytest.raises(KeyError, match="the caller's"), side.running(lambda: None):
        raise KeyError("the caller's")
    with side.running(lambda: None):
        pass
