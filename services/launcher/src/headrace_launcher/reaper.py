"""Ends a dead supervisor's processes. Run as a script, isolated: no imports of ours.

The supervisor writes ``+PGID`` and ``-PGID`` lines to this process's stdin as process groups come
and go. End of file means that it is gone, however it went (SIGKILL included): what is still listed
then is ended, first by SIGTERM, then by SIGKILL. Groups, so that children of children go too.
"""

import contextlib
import os
import signal
import sys
import time

GRACE_S = 3.0


def main() -> None:
    """Follow the supervisor until it is gone, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    _send(groups, signal.SIGTERM)
    deadline_s = time.monotonic() + GRACE_S
    while groups and time.monotonic() < deadline_s:
        groups = {group for group in groups if _is_alive(group)}
        time.sleep(0.05)
    _send(groups, signal.SIGKILL)


def _send(groups: set[int], number: signal.Signals) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    main()
