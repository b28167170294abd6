"""A process that ends is started again, later each time."""

import subprocess
from types import SimpleNamespace

import pytest

from kimi_backend.hosting.supervised_process import GOOD_FOR_S, PAUSES_S, SupervisedProcess


class Starter:
    def __init__(self):
        self.now = 0.0
        self.code = None
        self.started_at = []
        self.said = []
        self.kept = SupervisedProcess("thing", self.start, self.said.append, lambda: self.now)

    def start(self):
        self.started_at.append(self.now)
        self.code = None
        return SimpleNamespace(poll=lambda: self.code)

    def look_until(self, end):
        while self.now < end:
            self.now += 0.5
            self.kept.look()


def test_one_that_lives_is_left_alone():
    one = Starter()
    one.look_until(100.0)
    assert (one.started_at, one.said) == ([0.0], [])


def test_pauses_grow_and_begin_anew():
    one = Starter()
    expected = [0.0]
    for pause in (*PAUSES_S, PAUSES_S[-1]):
        one.code = 3
        one.look_until(one.now + 0.5 + pause)
        expected.append(one.now)
        assert one.started_at == expected
        assert one.said[-1] == f"the thing ended by itself with code 3: it is started again in {pause:g} s"
    one.look_until(one.now + GOOD_FOR_S)
    one.code = 3
    one.look_until(one.now + 0.5 + PAUSES_S[0])
    assert one.started_at == [*expected, one.now]


@pytest.mark.parametrize("is_stubborn", [False, True])
def test_one_that_is_stopped_has_ended(is_stubborn):
    done = []

    def wait(timeout_s=None):
        done.append(("wait", timeout_s))
        if is_stubborn and timeout_s is not None:
            raise subprocess.TimeoutExpired("thing", timeout_s)

    process = SimpleNamespace(
        terminate=lambda: done.append("terminate"), kill=lambda: done.append("kill"), wait=wait, poll=lambda: None
    )
    SupervisedProcess("thing", lambda: process, done.append).stop()
    assert done == ["terminate", ("wait", 5.0), *(["kill", ("wait", None)] if is_stubborn else [])]
