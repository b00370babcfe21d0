"""One engine's ZMQ sockets: live messages, and those of the past on request.

Live: a PUB socket sends (topic, number as 8 bytes big-endian, payload); numbers start at 0 and grow
by 1. Replay: a ROUTER socket is asked with (empty, first number) and answers one message per batch
it still has, (empty, number, payload), then number -1.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import NamedTuple

import zmq
import zmq.asyncio

_REPLAY_TIMEOUT_S = 5.0
# Messages that wait unread in this process; beyond it they are lost and replayed.
_MAX_UNREAD = 10_000
_END = (1 << 64) - 1


class EngineMessage(NamedTuple):
    """One published batch."""

    number: int
    payload: bytes


class ZmqSource:
    """Sockets of one engine; use as a context manager.

    Args:
        events: endpoint of the PUB socket.
        replay: endpoint of the ROUTER socket; None = there is none.
        topic: what is subscribed.
        on_unreadable: called with each message that is none of the protocol; it is passed over, and
            the number of the next one shows the gap.
    """

    def __init__(
        self, events: str, replay: str | None, topic: str, on_unreadable: Callable[[str], None]
    ) -> None:
        self._on_unreadable = on_unreadable
        self._context = zmq.asyncio.Context()
        self._replay = replay
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt(zmq.RCVHWM, _MAX_UNREAD)
        self._live.subscribe(topic.encode())
        self._live.connect(events)

    def __enter__(self) -> ZmqSource:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._context.destroy(linger=0)

    async def receive(self, timeout_s: float) -> EngineMessage | None:
        """Return the next live message, or None if none came in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    message = self._read(await self._live.recv_multipart())
                    if message is not None:
                        return message
        return None

    async def replay(self, first: int) -> list[EngineMessage]:
        """Return the batches from number *first* on that the engine still has; none on silence.

        Of several with an unreadable one among them, those behind it.
        """
        if self._replay is None:
            return []
        found: list[EngineMessage] = []
        with self._context.socket(zmq.DEALER) as socket, contextlib.suppress(TimeoutError):
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._replay)
            async with asyncio.timeout(_REPLAY_TIMEOUT_S):
                await socket.send_multipart([b"", first.to_bytes(8, "big")])
                while True:
                    one = self._read(await socket.recv_multipart())
                    if one is None:
                        found.clear()
                    elif one.number == _END:
                        break
                    else:
                        found.append(one)
        return found

    def _read(self, frames: list[bytes]) -> EngineMessage | None:
        # Engines differ in what stands before the last two frames.
        if len(frames) < 2 or len(frames[-2]) != 8:
            self._on_unreadable(f"a message of {len(frames)} frames is none of KV events")
            return None
        return EngineMessage(int.from_bytes(frames[-2], "big"), frames[-1])
