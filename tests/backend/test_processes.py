"""Alive, dead and not waited for, gone; descriptors; and memory that goes back."""

import os
import resource
import subprocess
import sys

import pytest

from kimi_backend.processes import LARGE_BYTES, LARGE_BYTES_VARIABLE, is_alive
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


RAISED = """
import resource
from kimi_backend.processes import raise_descriptor_limit
raise_descriptor_limit(print)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
LOW = "open files: the hard limit of 512 is low, each connection takes one: raise it (ulimit -Hn)"


@pytest.mark.parametrize(
    ("soft", "hard", "said"),
    [
        (128, 4096, ["open files: 128 were allowed, 4096 are now"]),
        (4096, 4096, []),
        (128, 512, ["open files: 128 were allowed, 512 are now", LOW]),
        (512, 512, [LOW]),
    ],
)
def test_as_many_descriptors_as_the_hard_limit_allows(soft, hard, said):
    done = subprocess.run(
        [sys.executable, "-c", RAISED],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
        capture_output=True,
        check=True,
        text=True,
    )
    assert done.stdout.splitlines() == [*said, f"{hard} {hard}"]


KEPT = """
import sys
from pathlib import Path
from kimi_backend.processes import give_large_memory_back, keep_large_memory

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

for call in sys.argv[1:]:
    globals()[call]()
large, small = [b"x" * 2**23], []
large.clear()
before = resident_bytes()
for _ in range(64):
    large.append(b"x" * 2**20)
    small.append(bytearray(2**16))
large.clear()
print(resident_bytes() - before)
"""


def kept_bytes(*calls, **variables):
    command = [sys.executable, "-c", KEPT, *calls]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, check=True, text=True)
    return int(done.stdout)


def test_memory_of_large_objects_goes_back():
    assert kept_bytes() > 32 * 2**20, "it would stay"
    assert kept_bytes("give_large_memory_back") < 8 * 2**20
    variable = {LARGE_BYTES_VARIABLE: str(LARGE_BYTES)}
    assert kept_bytes(**variable) < 8 * 2**20
    assert kept_bytes("keep_large_memory", **variable) > 32 * 2**20
