"""How a client's session reaches its peer: over plain TCP, or over gRPC if the address says so.

``host:port`` is TCP (`frame_socket`). ``grpc://host:port`` is the gRPC method `Session.Open`, for
networks whose proxies understand nothing else; it costs about ten times the CPU a frame.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

import grpc

from headrace_common.frame_socket import MAX_FRAME_ITEMS, PREFACE, FrameSocket
from headrace_common.lifecycle import cancel_and_wait
from headrace_common.rpc import open_channel
from headrace_common.settings import split_address
from headrace_contracts.session.v1.session_pb2 import Frame

OPEN_PATH = "/headrace.session.v1.Session/Open"
_GRPC = "grpc://"
OnFrame = Callable[[Frame], None]
OnLost = Callable[[], None]


class SessionLink(Protocol):
    """One connection of a client to its peer."""

    @property
    def is_open(self) -> bool:
        """Whether items still go out."""
        ...

    @property
    def heard_s(self) -> float:
        """Loop time at which the peer last said anything."""
        ...

    async def connect(self) -> None:
        """Connect, and wait until the peer has answered.

        Raises:
            OSError: it cannot be reached.
        """
        ...

    def put(self, item: bytes) -> None:
        """Add an item to the next frame."""
        ...

    async def close(self) -> None:
        """End the connection."""
        ...


def link_to(
    address: str, on_frame: OnFrame, on_lost: OnLost, silence_s: float | None = None
) -> SessionLink:
    """Return a link that is not connected yet.

    Args:
        address: host:port, or grpc://host:port.
        on_frame: called with each frame.
        on_lost: called when the connection is over.
        silence_s: see `FrameSocket`; gRPC has its own bound.
    """
    if address.startswith(_GRPC):
        return GrpcLink(address.removeprefix(_GRPC), on_frame, on_lost)
    return TcpLink(address, on_frame, on_lost, silence_s)


class TcpLink:
    """Frames over plain TCP."""

    def __init__(
        self, address: str, on_frame: OnFrame, on_lost: OnLost, silence_s: float | None
    ) -> None:
        self._address = address
        self._socket = FrameSocket(on_frame, on_lost, PREFACE, silence_s)
        self.put = self._socket.put

    @property
    def is_open(self) -> bool:
        """Whether items still go out."""
        return self._socket.is_open

    @property
    def heard_s(self) -> float:
        """Loop time at which the peer last said anything."""
        return self._socket.heard_s

    async def connect(self) -> None:
        """Connect, and wait for the peer's first beat.

        Raises:
            OSError: nobody listens, or the connection ended before that beat. A peer that is killed
                may still be connected to for a moment.
        """
        host, port = split_address(self._address)
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: self._socket, host, port)
            await asyncio.wait({self._socket.greeted})
            if self._socket.greeted.cancelled():
                raise ConnectionAbortedError("The peer ended the connection without a word.")
        except BaseException:
            self._socket.abort()
            raise

    async def close(self) -> None:
        """Send what was put, then end the connection."""
        self._socket.close()


class GrpcLink:
    """Frames over one bidirectional gRPC stream."""

    def __init__(self, address: str, on_frame: OnFrame, on_lost: OnLost) -> None:
        self._channel = open_channel(address)
        self._on_frame, self._on_lost = on_frame, on_lost
        self._items: list[bytes] = []
        self._filled = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.is_open = False
        # Loop time at which the peer last said anything.
        self.heard_s = 0.0

    async def connect(self) -> None:
        """Wait until the channel is connected.

        Raises:
            OSError: nobody listens; told at once.
        """
        while (
            state := self._channel.get_state(try_to_connect=True)
        ) is not grpc.ChannelConnectivity.READY:
            if state in (
                grpc.ChannelConnectivity.TRANSIENT_FAILURE,
                grpc.ChannelConnectivity.SHUTDOWN,
            ):
                await self._channel.close()
                raise ConnectionRefusedError("The channel cannot be connected.")
            await self._channel.wait_for_state_change(state)
        stub: grpc.aio.StreamStreamMultiCallable[Frame, Frame] = self._channel.stream_stream(
            OPEN_PATH,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=Frame.FromString,
        )
        stream = stub()
        self.is_open = True
        self._tasks = [
            asyncio.create_task(self._write(stream)),
            asyncio.create_task(self._read(stream)),
        ]

    def put(self, item: bytes) -> None:
        """Add an item to the next frame."""
        self._items.append(item)
        self._filled.set()

    async def close(self) -> None:
        """End the connection."""
        self._lose()
        await cancel_and_wait(*self._tasks)
        await self._channel.close()

    async def _write(self, stream: grpc.aio.StreamStreamCall[Frame, Frame]) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._filled.wait()
                items, self._items = self._items[:MAX_FRAME_ITEMS], self._items[MAX_FRAME_ITEMS:]
                if not self._items:
                    self._filled.clear()
                await stream.write(Frame.FromString(b"".join(items)))
        self._lose()

    async def _read(self, stream: grpc.aio.StreamStreamCall[Frame, Frame]) -> None:
        try:
            async for frame in stream:
                self.heard_s = asyncio.get_running_loop().time()
                self._on_frame(frame)
        except grpc.aio.AioRpcError:
            # Told to every call below.
            pass
        finally:
            self._lose()

    def _lose(self) -> None:
        if self.is_open:
            self.is_open = False
            self._on_lost()
