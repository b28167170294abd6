"""The visible state of another process on this machine, and what a long-lived one does to itself."""

import ctypes
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

_DEAD_STATES = ("Z", "X")
_PR_SET_PDEATHSIG = 1
_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
_KEPT_BYTES = 2**25
"""The most that glibc takes for a usual object."""
LARGE_BYTES = 2**19
"""Above what a socket is read by, which is 256 KiB: each such piece would cost its pages."""
LARGE_BYTES_VARIABLE = "MALLOC_MMAP_THRESHOLD_"
"""The variable by which a process that is started does what `give_large_memory_back` does in this one."""
MOST_DESCRIPTORS = 2**20
"""The limit where the hard one is higher, or there is none: Linux gives a process no more unless it is told to."""
FEW_DESCRIPTORS = 4096
"""Below it the user is told: the endpoint alone takes as many connections."""


def is_alive(process_id: int, proc: Path = Path("/proc")) -> bool:
    """Tell whether a process runs: one that has ended but was not waited for does not. True where /proc cannot tell."""
    if not (proc / "self").exists():
        return True
    try:
        state = (proc / str(process_id) / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return False
    return state not in _DEAD_STATES


def start_ticks(process_id: int, proc: Path = Path("/proc")) -> str:
    """The time at which it started, in the machine's clock ticks: tells it from a later process of the same id. Empty
    where /proc cannot tell."""
    try:
        return (proc / str(process_id) / "stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return ""


def end_with_starter(parent_pid: int) -> None:
    """Be killed when the thread that started this process ends, and by no signal that a terminal or a service manager
    sends to all processes: rank 0 says when. Linux only; elsewhere the end of a pipe is the sign."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # died before the line above
        os._exit(1)


def freeze_what_is_loaded() -> None:
    """Take all objects of now out of the garbage collector's sight: a look at all of them, modules and a tokenizer's
    tables included, would hold a step up for tens of milliseconds. Call it once a server has loaded everything."""
    gc.collect()
    gc.freeze()


def raise_descriptor_limit(say: Callable[[str], None]) -> None:
    """Let this process, and those that it starts, open as many files and connections as the hard limit allows. Who
    accepts connections until its descriptors are out accepts none then, nor answers on those that it has.

    Args:
        say: gets a line if the limit is another one now, or is low and cannot be raised.
    """
    found, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if found == resource.RLIM_INFINITY:
        return
    allowed = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if found < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        say(f"open files: {found} were allowed, {allowed} are now")
    if max(found, allowed) < FEW_DESCRIPTORS:
        say(f"open files: the hard limit of {hard} is low, each connection takes one: raise it (ulimit -Hn)")


def give_large_memory_back() -> None:
    """Let the memory of large objects go back to the system as soon as they are freed, for the time of their pages'
    faults. Left alone, glibc takes the largest object that was freed for a usual one, and keeps what lies between
    smaller ones: 100 MB after sixty requests of 8 MB. Linux only, as the rest of the server."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def keep_large_memory() -> None:
    """Keep the memory of freed objects for the next ones, in a process whose starter has set LARGE_BYTES_VARIABLE: a
    step's tensors are as large as those of the step before, and would cost their pages' faults each time."""
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _KEPT_BYTES)


def give_freed_memory_back() -> None:
    """Give back what many small objects leave free between others. It takes a millisecond for each megabyte, in which
    other threads run."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).malloc_trim(0)
