"""One port for two protocols: sessions are served here, gRPC is passed on to the server behind.

::

    client --PREFACE--> session (`frame_socket`)
           --"PRI *"--> bytes both ways --> gRPC's own listener, on this machine only

So an address stays one address, and tools, health checks and reflection find gRPC where they look.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import cast

from headrace_common.frame_socket import PREFACE, FrameSocket

# Who connects and says nothing for so long is let go.
_PREFACE_S = 10.0
_BACKLOG = 1024


def inner_address(unique: str) -> str:
    """Return where the gRPC server behind listens: in memory on Linux, else on loopback."""
    return f"unix-abstract:{unique}" if sys.platform == "linux" else "127.0.0.1:0"


class RpcFront:
    """Listens on the public address.

    Args:
        make_session: makes the server's end of a session.
        inner: address of the gRPC server, as given to it.
        inner_port: its port, if it has one.
    """

    def __init__(
        self, make_session: Callable[[], FrameSocket], inner: str, inner_port: int
    ) -> None:
        self._make_session, self._inner, self._inner_port = make_session, inner, inner_port
        self._server: asyncio.Server | None = None
        self._transports: set[asyncio.Transport] = set()
        self._opening: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> int:
        """Begin to accept; return the port.

        Raises:
            OSError: the address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Sniffer(self), host, port, backlog=_BACKLOG)
        return self._listens(server)

    async def listen_on(self, listener: socket.socket) -> int:
        """Begin to accept on a socket that somebody else holds too; return the port."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Sniffer(self), sock=listener, backlog=_BACKLOG)
        return self._listens(server)

    def _listens(self, server: asyncio.Server) -> int:
        self._server = server
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def stop_listening(self) -> None:
        """Accept no further connection; those that are open go on."""
        if self._server is not None:
            self._server.close()

    def close(self) -> None:
        """Stop listening and cut every connection."""
        self.stop_listening()
        for task in self._opening:
            task.cancel()
        for transport in list(self._transports):
            transport.abort()

    def add(self, transport: asyncio.Transport) -> None:
        """Note a connection."""
        self._transports.add(transport)

    def drop(self, transport: asyncio.Transport) -> None:
        """Forget a connection that is over."""
        self._transports.discard(transport)

    def begin_session(self, transport: asyncio.Transport, rest: bytes) -> None:
        """Serve a session on a connection; *rest* came behind the preface."""
        session = self._make_session()
        transport.set_protocol(_Counted(self, transport, session))
        session.connection_made(transport)
        if rest:
            session.data_received(rest)

    def begin_grpc(self, transport: asyncio.Transport, begun: bytes) -> None:
        """Pass a connection on, *begun* first."""
        transport.pause_reading()
        task = asyncio.get_running_loop().create_task(self._pass_on(transport, begun))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _pass_on(self, outer: asyncio.Transport, begun: bytes) -> None:
        loop = asyncio.get_running_loop()
        inward = _Pipe(self)
        # Before it connects: a gRPC server speaks first.
        inward.other = outer
        try:
            if self._inner_port > 1:
                await loop.create_connection(lambda: inward, "127.0.0.1", self._inner_port)
            else:
                await loop.create_unix_connection(lambda: inward, sock=await self._abstract())
        except OSError:
            outer.abort()
            return
        if outer.is_closing() or inward.transport is None:
            inward.abort()
            return
        outward = _Pipe(self)
        outer.set_protocol(outward)
        outward.connection_made(outer)
        outward.other = inward.transport
        inward.transport.write(begun)
        outer.resume_reading()

    async def _abstract(self) -> socket.socket:
        # Connected here: uvloop takes no abstract names.
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            name = "\0" + self._inner.partition(":")[2]
            await asyncio.get_running_loop().sock_connect(connection, name)
        except OSError:
            connection.close()
            raise
        return connection


class _Sniffer(asyncio.Protocol):
    """Reads the first bytes and decides."""

    def __init__(self, front: RpcFront) -> None:
        self._front = front
        self._begun = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._front.add(self._transport)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_PREFACE_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        self._begun += data
        transport = self._transport
        if transport is None or (
            len(self._begun) < len(PREFACE) and PREFACE.startswith(self._begun)
        ):
            return
        self._stop_timer()
        if self._begun.startswith(PREFACE):
            self._front.begin_session(transport, self._begun[len(PREFACE) :])
        else:
            self._front.begin_grpc(transport, self._begun)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._transport is not None:
            self._front.drop(self._transport)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Counted(asyncio.Protocol):
    """A session that the front forgets when it is over."""

    def __init__(self, front: RpcFront, transport: asyncio.Transport, session: FrameSocket) -> None:
        self._front, self._transport, self._session = front, transport, session
        self.data_received = session.data_received  # type: ignore[method-assign]  # one call less
        self.pause_writing = session.pause_writing  # type: ignore[method-assign]
        self.resume_writing = session.resume_writing  # type: ignore[method-assign]

    def connection_lost(self, exc: Exception | None) -> None:
        self._front.drop(self._transport)
        self._session.connection_lost(exc)


class _Pipe(asyncio.Protocol):
    """One side of a connection that is passed on: what comes in goes out on the other side."""

    def __init__(self, front: RpcFront) -> None:
        self._front = front
        self.transport: asyncio.Transport | None = None
        self.other: asyncio.Transport | None = None

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._front.add(self.transport)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and not self.other.is_closing():
            self.other.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.is_closing():
            self.other.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.transport is not None:
            self._front.drop(self.transport)
        if self.other is not None:
            self.other.close()
