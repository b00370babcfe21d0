"""Notices at once that a broker went away, even if another stands in its place a moment later.

A Kafka client reconnects silently. That is harmless with a log on disk and wrong with one in
memory: the new log may already be longer than the place where the old one was being read. So an
idle connection is kept beside the client's own; its end means: compare the log first. Brokers end
idle connections themselves after a while (Kafka after ten minutes), so each is replaced before.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

from headrace_common.settings import split_address

_CONNECT_TIMEOUT_S = 5.0
_REFRESH_S = 240.0
_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class BrokerWatch:
    """An idle connection to the first of the brokers. Use as an async context manager.

    Args:
        bootstrap_servers: host:port,... of brokers.
        refresh_s: age at which a connection is replaced.

    Raises:
        OSError: on entry, the broker cannot be reached.
    """

    def __init__(self, bootstrap_servers: str, refresh_s: float = _REFRESH_S) -> None:
        self._host, self._port = split_address(bootstrap_servers.split(",")[0].strip())
        self._refresh_s, self._due_s = refresh_s, 0.0
        self._connection: _Connection | None = None

    @property
    def is_broken(self) -> bool:
        """Whether the broker has closed the connection since entry."""
        if self._connection is None:
            return True
        reader = self._connection[0]
        return reader.at_eof() or reader.exception() is not None

    async def refresh(self) -> None:
        """Watch a new connection if this one is old; one that broke meanwhile stays.

        Raises:
            OSError: the broker cannot be reached.
        """
        if asyncio.get_running_loop().time() >= self._due_s:
            spare = await self._connect()
            if not self.is_broken:
                spare, self._connection = self._connection, spare
            await _close(spare)

    async def __aenter__(self) -> BrokerWatch:
        self._connection = await self._connect()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await _close(self._connection)

    async def _connect(self) -> _Connection | None:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            opened = await asyncio.open_connection(self._host, self._port)
        self._due_s = asyncio.get_running_loop().time() + self._refresh_s
        return opened


async def _close(connection: _Connection | None) -> None:
    if connection is not None:
        connection[1].close()
        with contextlib.suppress(OSError):
            await connection[1].wait_closed()
