"""Handing over: a process that is told to stop goes on serving until its successor does.

Whoever starts the process holds the other end of a pair of sockets (`succession_fd`)::

    process --one byte--> starter     told to stop; the addresses of its own are given up
    process <--the end--- starter     the successor serves, or there will be none

Both processes listen on one socket that the starter holds (`listen_fd`), so whoever connects is
answered all the time, by the one or the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket

from headrace_common.metrics import ObservabilityServer

# A starter that says nothing for so long has forgotten us.
_LONGEST_S = 60.0


def inherited_listener(descriptor: int) -> socket.socket:
    """Take a bound socket that whoever started this process holds too.

    Raises:
        OSError: the descriptor is none of a bound TCP socket.
    """
    try:
        listener = socket.socket(fileno=descriptor)
    except OSError as error:
        why = f"cannot listen on descriptor {descriptor}: {error.strerror}"
        raise OSError(error.errno, why) from error
    is_internet = listener.family in (socket.AF_INET, socket.AF_INET6)
    if not is_internet or listener.type != socket.SOCK_STREAM or not listener.getsockname()[1]:
        listener.close()
        raise OSError(
            errno.EINVAL, f"cannot listen on descriptor {descriptor}: not a bound TCP socket"
        )
    listener.set_inheritable(False)
    listener.setblocking(False)
    return listener


class Succession:
    """A process's end. Belongs to one event loop.

    Args:
        descriptor: inherited; None = nobody waits for us to leave.

    Raises:
        OSError: the descriptor is none of a socket.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._line: socket.socket | None = None
        if descriptor is not None:
            try:
                self._line = socket.socket(fileno=descriptor)
            except OSError as error:
                why = f"cannot hand over by descriptor {descriptor}: {error.strerror}"
                raise OSError(error.errno, why) from error
            self._line.set_inheritable(False)
            self._line.setblocking(False)

    async def until_served(self, shown: ObservabilityServer | None) -> None:
        """Tell that we leave; return when a successor serves, or when none will come.

        Args:
            shown: closed before that, as the successor shows itself at the same address.
        """
        if self._line is None:
            return
        if shown is not None:
            await asyncio.to_thread(shown.close)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_LONGEST_S):
                await loop.sock_sendall(self._line, b"1")
                await loop.sock_recv(self._line, 1)

    def close(self) -> None:
        """Close our end."""
        if self._line is not None:
            self._line.close()
