"""Become a command that is asked to end (SIGTERM) when the process that started it has died, however it died.

    python with_parent.py PARENT_PID COMMAND ...

Linux only (prctl). Run as a file and by name, so that it imports nothing. The signal follows the *thread* that started
the command: use it from a thread that lives as long as its process.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Does not return."""
    parent, command = int(arguments[0]), arguments[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0):
        sys.stderr.write(f"if its parent is killed, {command[0]} will not end: {os.strerror(ctypes.get_errno())}\n")
    if os.getppid() != parent:  # died before the line above
        sys.exit(f"the process {parent} that wanted {command[0]} has died")
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
