"""A process that waits for shared memory sleeps until another one has written it."""

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from kimi_backend.runners.hand_over import futex
from kimi_backend.runners.hand_over.order import HostOrder
from kimi_backend.runners.hand_over.semaphores import DRAFTED, VERIFIED, OwnSemaphores
from support.waiting import PATIENCE_S, wait_for

WRITER = """
import sys
from kimi_backend.runners.hand_over.semaphores import VERIFIED, OpenedSemaphores
opened = OpenedSemaphores.open(sys.stdin.readline().encode())
for line in sys.stdin:
    opened.semaphores.set_value(VERIFIED, int(line))
    print("written", flush=True)
"""


@pytest.fixture
def own() -> Iterator[OwnSemaphores]:
    made = OwnSemaphores((5, 9))
    yield made
    made.close()


def waiting(order: HostOrder, value: int) -> threading.Thread:
    thread = threading.Thread(target=order.wait, args=(VERIFIED, value), daemon=True)
    thread.start()
    return thread


def test_another_process_wakes_who_waits(own: OwnSemaphores, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else would: a sleeper looks by itself after longer than the test is patient."""
    monkeypatch.setattr(futex, "_LOOK_S", 10 * PATIENCE_S)
    thread = waiting(HostOrder(own.semaphores), 2**33 + 2)
    with subprocess.Popen([sys.executable, "-c", WRITER], stdin=-1, stdout=-1, text=True) as writer:
        assert writer.stdin is not None and writer.stdout is not None
        print(own.handle.decode(), file=writer.stdin, flush=True)
        for value in (1, 2**33 + 1):
            print(value, file=writer.stdin, flush=True)
            assert writer.stdout.readline() == "written\n"
            assert thread.is_alive()
        print(2**33 + 2, file=writer.stdin, flush=True)
        wait_for(lambda: not thread.is_alive())
        writer.stdin.close()


def test_a_value_that_is_there_is_not_waited_for(own: OwnSemaphores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futex, "_LOOK_S", 10 * PATIENCE_S)
    own.semaphores.set_value(VERIFIED, 7)
    HostOrder(own.semaphores).wait(VERIFIED, 7)
    own.semaphores.sleep_while(VERIFIED, 6)
    own.semaphores.set_value(DRAFTED, 9)
    thread = waiting(HostOrder(own.semaphores), 8)
    assert thread.is_alive()
    own.semaphores.set_value(VERIFIED, 8)
    wait_for(lambda: not thread.is_alive())


def test_a_process_that_closes_waits_no_longer(own: OwnSemaphores) -> None:
    order = HostOrder(own.semaphores)
    thread = waiting(order, 1)
    order.close()
    wait_for(lambda: not thread.is_alive())


def test_without_the_system_call_it_looks_again_and_again(own: OwnSemaphores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futex, "_futex", lambda: None)
    thread = waiting(HostOrder(own.semaphores), 1)
    own.semaphores.set_value(VERIFIED, 1)
    wait_for(lambda: not thread.is_alive())
