"""Notices at once that a broker went away, even if another stands in its place a moment later.

A Kafka client reconnects silently. That is harmless with a log on disk and wrong with one in
memory: the new log may already be longer than the place where the old one was being read. So an
idle connection is kept beside the client's own; its end means: compare the log first.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

from headrace_common.settings import split_address

_CONNECT_TIMEOUT_S = 5.0


class BrokerWatch:
    """An idle connection to the first of the brokers. Use as an async context manager.

    Raises:
        OSError: on entry, the broker cannot be reached.
    """

    def __init__(self, bootstrap_servers: str) -> None:
        self._host, self._port = split_address(bootstrap_servers.split(",")[0].strip())
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def is_broken(self) -> bool:
        """Whether the broker has closed the connection since entry."""
        reader = self._reader
        return reader is None or reader.at_eof() or reader.exception() is not None

    async def __aenter__(self) -> BrokerWatch:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
