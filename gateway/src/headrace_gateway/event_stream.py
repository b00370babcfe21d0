"""Server-sent events on the wire: queued, sent in one piece, kept alive while silent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson

from headrace_common.clock import Clock
from headrace_gateway.answer_format import escape_separators
from headrace_gateway.visit import Exchange


class EventWriter:
    """Writes framed events of one answer.

    Args:
        exchange: the connection.
        clock: time.
        keep_alive: what is sent into a silence.
    """

    def __init__(self, exchange: Exchange, clock: Clock, keep_alive: bytes) -> None:
        self._exchange, self._clock, self._keep_alive = exchange, clock, keep_alive
        self._waiting: list[bytes] = []
        self._lock = asyncio.Lock()
        self._is_sending = False
        self._last_sent_s = clock.now_s()

    def put(self, event: bytes) -> None:
        """Queue an event for the next `flush`."""
        self._waiting.append(event)

    async def flush(self, *, is_last: bool = False) -> None:
        """Send what is queued in one piece."""
        waiting, self._waiting = b"".join(self._waiting), []
        if waiting or is_last or not self._exchange.has_begun:
            await self._send(waiting, is_last=is_last)

    def try_flush(self) -> bool:
        """Send what is queued in one piece if nothing must be waited for."""
        waiting = self._waiting
        if not waiting:
            return self._exchange.has_begun
        events = waiting[0] if len(waiting) == 1 else b"".join(waiting)
        if self._is_sending or not self._exchange.try_send_events(events):
            return False
        self._waiting = []
        self._last_sent_s = self._clock.now_s()
        return True

    async def keep_alive(self, every_s: float) -> None:
        """Send something if nothing was sent yet, then after each such silence; until cancelled."""
        while True:
            silent_s = self._clock.now_s() - self._last_sent_s
            if silent_s >= every_s or not self._exchange.has_begun:
                await self._send(self._keep_alive)
            else:
                await asyncio.sleep(every_s - silent_s)

    async def _send(self, events: bytes, *, is_last: bool = False) -> None:
        async with self._lock:
            self._is_sending = True
            try:
                if not self._exchange.has_begun:
                    await self._exchange.begin_stream()
                self._last_sent_s = self._clock.now_s()
                await self._exchange.send_events(events, is_last=is_last)
            finally:
                self._is_sending = False


class EventStream(EventWriter):
    """Writes named events, and counts them."""

    def __init__(self, exchange: Exchange, clock: Clock, keep_alive: bytes) -> None:
        super().__init__(exchange, clock, keep_alive)
        # Ever queued, those before this stream included.
        self.num_events = exchange.num_events

    def add(self, kind: str, data: Mapping[str, Any]) -> None:  # Any: JSON values
        """Queue an event for the next `flush`; its data carries its kind as `type`."""
        self.num_events += 1
        self._exchange.num_events = self.num_events
        self.put(named_event(kind, orjson.dumps({"type": kind, **data})))


def named_event(kind: str, data: bytes) -> bytes:
    """Frame one event."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), escape_separators(data))
