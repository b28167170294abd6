"""Alive, dead and not waited for, gone."""

import os
import subprocess
import sys

from kimi_backend.processes import is_alive
from support.waiting import wait_for


def test_a_process_is_alive_until_it_ends():
    assert is_alive(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_alive(child.pid)
    child.kill()
    wait_for(lambda: not is_alive(child.pid))  # a zombie: nobody has waited for it
    child.communicate()
    assert not is_alive(child.pid)


def test_without_proc_nothing_is_declared_dead(tmp_path):
    assert is_alive(os.getpid(), tmp_path)
