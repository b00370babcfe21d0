"""One connection to Redis that sends many commands at once, with little Python per command.

redis-py sends and reads command by command through several coroutines each; for a service whose
every request is one short script that is most of the cost. This is the rest: hiredis packs and
parses, one future stands for a whole batch. Batches may be sent while others are under way; replies
come in the order of the commands.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis
from redis.asyncio.connection import parse_url

# What Redis answers; an error is a value. Any: numbers, bytes and lists of them.
Reply = Any
CommandPart = str | bytes | int
_Packed = tuple[str | int | float | bytes | memoryview]


class RedisPipeline:
    """One connection. Belongs to one event loop. Make it with `connect`."""

    def __init__(self, protocol: _Replies, transport: asyncio.Transport) -> None:
        self._protocol, self._transport = protocol, transport

    @classmethod
    async def connect(
        cls, url: str, on_lost: Callable[[Exception], None] = lambda _: None
    ) -> RedisPipeline:
        """Connect, authenticate and select the database that a URL names. Bound it from outside.

        Args:
            url: redis://, rediss:// or unix://.
            on_lost: called if the server or the network ends the connection.

        Raises:
            OSError: nobody listens there, or the connection broke.
            RefusedError: Redis wants another password or has no such database.
        """
        # Any: redis-py's own options.
        options = cast("dict[str, Any]", parse_url(url))
        loop = asyncio.get_running_loop()
        if path := options.get("path"):
            made = await loop.create_unix_connection(lambda: _Replies(on_lost), path)
        else:
            made = await loop.create_connection(
                lambda: _Replies(on_lost),
                options.get("host", "localhost"),
                options.get("port", 6379),
                ssl=_tls(options) if url.startswith("rediss://") else None,
            )
        pipeline = cls(made[1], made[0])
        try:
            await pipeline._introduce(options)
        except BaseException:
            pipeline.close()
            raise
        return pipeline

    def send(self, commands: Sequence[Sequence[CommandPart]]) -> asyncio.Future[list[Reply]]:
        """Send commands, at least one; the future gets their replies, `ReplyError`s among them.

        They are sent as one write, after those of earlier calls.

        Cancelling the future does not call the commands back; close the connection then.

        Raises:
            OSError: the connection is gone.
        """
        if self._transport.is_closing():
            raise ConnectionError("the connection to Redis is closed")
        # Packed first: what cannot be sent must not wait for a reply, or each later one would go to
        # the batch before its own.
        packed = [hiredis.pack_command(cast("_Packed", tuple(it))) for it in commands]
        replies = self._protocol.expect(len(commands))
        self._transport.write(b"".join(packed))
        return replies

    def close(self) -> None:
        """Cut the connection; what waits for replies gets a `ConnectionError`."""
        self._protocol.is_closed_by_us = True
        self._transport.abort()
        self._protocol.fail(ConnectionError("the connection to Redis was closed"))

    async def _introduce(self, options: dict[str, Any]) -> None:  # Any: redis-py's own options
        commands: list[list[CommandPart]] = []
        if password := options.get("password"):
            user = options.get("username")
            commands.append(["AUTH", *([user] if user else []), password])
        if database := options.get("db"):
            commands.append(["SELECT", int(database)])
        if not commands:
            return
        for reply in await self.send(commands):
            if isinstance(reply, hiredis.ReplyError):
                raise RefusedError(str(reply))


class RefusedError(OSError):
    """Redis does not let us in."""


class _Batch:
    """Commands that were sent together, and the replies so far."""

    __slots__ = ("missing", "replies", "whole")

    def __init__(self, num_replies: int) -> None:
        self.missing = num_replies
        self.replies: list[Reply] = []
        self.whole: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()


class _Replies(asyncio.Protocol):
    """Gives replies to the batches in the order in which these were sent."""

    def __init__(self, on_lost: Callable[[Exception], None]) -> None:
        self._on_lost = on_lost
        self.is_closed_by_us = False
        self._reader = hiredis.Reader()
        self._batches: deque[_Batch] = deque()

    def expect(self, num_replies: int) -> asyncio.Future[list[Reply]]:
        batch = _Batch(num_replies)
        self._batches.append(batch)
        return batch.whole

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while self._batches:
            try:
                reply = self._reader.gets()
            except hiredis.ProtocolError as error:
                self.fail(ConnectionError(f"not a Redis server: {error}"))
                return
            if reply is False:
                return
            batch = self._batches[0]
            batch.replies.append(reply)
            batch.missing -= 1
            if not batch.missing:
                self._batches.popleft()
                if not batch.whole.done():
                    batch.whole.set_result(batch.replies)

    def connection_lost(self, exc: Exception | None) -> None:
        error = exc or ConnectionError("Redis closed the connection")
        self.fail(error)
        if not self.is_closed_by_us:
            self._on_lost(error)

    def fail(self, error: Exception) -> None:
        while self._batches:
            whole = self._batches.popleft().whole
            if not whole.done():
                whole.set_exception(error)
                # Whoever stopped waiting must not make this an "exception was never retrieved".
                whole.exception()


def _tls(options: dict[str, Any]) -> ssl.SSLContext:  # Any: redis-py's own options
    context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
    if options.get("ssl_cert_reqs") == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
