"""Becomes another program that ends when its parent does. Run as a script: no imports of ours.

Usage: ``python -I -S child_exec.py PARENT_PID PROGRAM [ARGUMENT...]``. The kernel sends SIGTERM to
the program when the thread that started it ends (prctl(2), PR_SET_PDEATHSIG); exec keeps that
setting.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask for the signal, then become the program."""
    parent_pid, program = int(sys.argv[1]), sys.argv[2]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # it ended before we could ask
        raise SystemExit(1)
    os.execv(program, sys.argv[2:])  # noqa: S606 - the supervisor names the program


if __name__ == "__main__":
    main()
