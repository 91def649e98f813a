"""Runs a program, and collects every process below it that ends without a parent.

``python tests/vm/reaper.py PROGRAM [ARGUMENT…]``. The guest's first process waits for its own child
alone. An orphan that nobody collects stays a zombie, and one inside a container's PID namespace
keeps the first process of that namespace from ending, for ever.
"""

import ctypes
import os
import sys

_PR_SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    """Run the command; returns its exit status."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")
    child = os.posix_spawnp(command[0], command, os.environ)
    while True:
        pid, status = os.wait()
        if pid == child:
            return abs(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
