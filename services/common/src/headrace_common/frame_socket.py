"""Session frames over plain TCP: what is put in one turn of the loop goes out as one frame.

A frame costs some 150 us of CPU at each end of Python's gRPC, whatever it carries, and a tenth of
that here. On the wire, both ways: length (u32 LE), `Frame`; before that, the client's `PREFACE`,
by which a server tells a session from gRPC on the same port (see `rpc_front`). Empty frames are
beats, one a second from the thread that reads and writes, whatever others compute: a peer that is
silent for five seconds, or what the client bears, is lost, so that a frozen one is noticed.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import cast

from google.protobuf.message import DecodeError

from headrace_contracts.session.v1.session_pb2 import Frame

PREFACE = b"HEADRACE-SESSION/2\r\n"
MAX_FRAME_BYTES = 64 * 2**20
# Items in one frame, so that a burst does not make a huge message.
MAX_FRAME_ITEMS = 256
BEAT_S = 1.0
SILENCE_S = 5.0
# A timer so late says that this process stood still: what the peer said may lie unread.
_STALL_S, _LOOK_AGAIN_S = 0.5, 0.1
_LENGTH = struct.Struct("<I")
_BEAT = _LENGTH.pack(0)


class FrameSocket(asyncio.Protocol):
    """One end of a session's connection. Belongs to one event loop.

    Args:
        on_frame: called with each frame that has items.
        on_lost: called once, when the connection is over.
        preface: sent first; a client's.
        silence_s: after so long without a word or beat the peer is lost; None = `SILENCE_S`.
    """

    def __init__(
        self,
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[], None],
        preface: bytes = b"",
        silence_s: float | None = None,
    ) -> None:
        self._on_frame, self._on_lost, self._preface = on_frame, on_lost, preface
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._silence_s = silence_s
        self._beater: asyncio.TimerHandle | None = None
        self._beat_due_s = 0.0
        # Loop time at which the peer last said anything, beats included.
        self.heard_s = 0.0
        self._received = bytearray()
        self._items: list[bytes] = []
        self._is_flushing = False
        # The peer reads slowly: items gather here.
        self.is_paused = False
        # Frames ever given to the transport, and items ever handed over.
        self.num_written = 0
        self.num_taken = 0
        # Whole frames wait for the loop's next turn.
        self._is_resting = False
        # Set by the first bytes of the peer.
        self.greeted: asyncio.Future[None] = self._loop.create_future()
        self.is_open = False

    def put(self, item: bytes) -> None:
        """Add an item (`session_items`) to the next frame; nothing once the connection is over."""
        self._items.append(item)
        if not self._is_flushing and not self.is_paused:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Send what was put, then end the connection."""
        if self._transport is not None and self.is_open:
            self._flush()
            self._transport.close()

    def abort(self) -> None:
        """End the connection now."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet the peer."""
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True
        self.heard_s = self._loop.time()
        self._transport.write(self._preface + _BEAT)
        self._beat_later(BEAT_S)

    def data_received(self, data: bytes) -> None:
        """Take bytes; hand over the frames that are whole, in turns if they are many."""
        self.heard_s = self._loop.time()
        if not self.greeted.done():
            self.greeted.set_result(None)
        if self._is_resting:
            self._received += data
        else:
            self._take_all(data)

    def _take_all(self, data: bytes) -> None:
        if self._received:
            self._received += data
            data = bytes(self._received) if self._has_whole_frame() else b""
        used = self._take_frames(data) if data else 0
        if self._received:
            del self._received[:used]
        elif used < len(data):
            self._received += data[used:]
        if self.is_open and self._has_whole_frame():
            # Who reads the messages has a turn first, or a burst would find nobody reading.
            self._is_resting = True
            self._reading().pause_reading()
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_resting = False
        if self.is_open:
            self._take_all(b"")
            if not self._is_resting:
                self._reading().resume_reading()

    def _reading(self) -> asyncio.Transport:
        return cast("asyncio.Transport", self._transport)

    def pause_writing(self) -> None:
        """The peer reads slowly: items gather."""
        self.is_paused = True

    def resume_writing(self) -> None:
        """Send what has gathered."""
        self.is_paused = False
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the owner."""
        self.is_open = False
        if self._beater is not None:
            self._beater.cancel()
        self.greeted.cancel()
        self._on_lost()

    def _has_whole_frame(self) -> bool:
        if len(self._received) < _LENGTH.size:
            return False
        size: int = _LENGTH.unpack_from(self._received)[0]
        return len(self._received) >= _LENGTH.size + size or size > MAX_FRAME_BYTES

    def _take_frames(self, data: bytes) -> int:
        """Handle whole frames, some `MAX_FRAME_ITEMS` at most; return how many bytes they were."""
        start, end = 0, len(data)
        most = self.num_taken + MAX_FRAME_ITEMS
        while end - start >= _LENGTH.size and self.num_taken < most:
            (size,) = _LENGTH.unpack_from(data, start)
            if size > MAX_FRAME_BYTES:
                self.abort()
                return end
            stop = start + _LENGTH.size + size
            if stop > end:
                break
            if size and not self._take(data[start + _LENGTH.size : stop]):
                return end
            start = stop
        return start

    def _take(self, encoded: bytes) -> bool:
        try:
            frame = Frame.FromString(encoded)
        except DecodeError:
            self.abort()
            return False
        self.num_taken += len(frame.items)
        self._on_frame(frame)
        return True

    def _flush(self) -> None:
        self._is_flushing = False
        if self._transport is None or not self.is_open or self.is_paused or not self._items:
            return
        items, self._items = self._items, []
        pieces: list[bytes] = []
        for start in range(0, len(items), MAX_FRAME_ITEMS):
            frame = b"".join(items[start : start + MAX_FRAME_ITEMS])
            pieces += (_LENGTH.pack(len(frame)), frame)
            self.num_written += 1
        self._transport.write(b"".join(pieces))

    def _beat(self) -> None:
        now_s = self._loop.time()
        left_s = self.heard_s - now_s + (SILENCE_S if self._silence_s is None else self._silence_s)
        if left_s <= 0 and now_s - self._beat_due_s < _STALL_S:
            self.abort()
            return
        if self._transport is not None and not self.is_paused:
            self._transport.write(_BEAT)
        self._beat_later(min(BEAT_S, left_s) if left_s > 0 else _LOOK_AGAIN_S)

    def _beat_later(self, delay_s: float) -> None:
        self._beat_due_s = self._loop.time() + delay_s
        self._beater = self._loop.call_later(delay_s, self._beat)
