"""Our end of a child's succession, see `headrace_common.succession`."""

from __future__ import annotations

import asyncio
import contextlib
import socket


class Succession:
    """One process that tells when it leaves, and serves on until we let it go."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)

    @property
    def descriptor(self) -> int:
        """What the process inherits."""
        return self._theirs.fileno()

    def is_inherited(self) -> None:
        """The process has its end; with ours alone we hear its death too."""
        self._theirs.close()

    async def until_leaving(self) -> bool:
        """Wait until the process leaves (True) or has gone without a word."""
        try:
            return bool(await asyncio.get_running_loop().sock_recv(self._ours, 1))
        except OSError:
            return False

    def let_go(self) -> None:
        """Tell the process that nobody needs it any more."""
        with contextlib.suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all that is open of it."""
        self._theirs.close()
        self._ours.close()
