"""The events of a background response, for whoever reads along and for whoever comes back.

An event's `sequence_number` is its place. The process that makes a response has its events in
memory; the state gets them in pieces, so that any process of the gateway can tell them, and any
time until the response is forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import orjson

from headrace_gateway.answer_extras import Json
from headrace_gateway.captured_exchange import CapturedExchange
from headrace_gateway.event_stream import named_event
from headrace_gateway.responses_api.sink import KEEP_ALIVE


class EventLog(CapturedExchange):
    """Takes the events of one response. Bounded by the request's output tokens.

    Args:
        keep_alive_s: who reads along is sent a comment after so much silence.
    """

    def __init__(self, keep_alive_s: float) -> None:
        super().__init__()
        self._keep_alive_s = keep_alive_s
        self.events: list[bytes] = []
        # Of `events`, those that are in the state.
        self.num_kept = 0
        self._news = asyncio.Event()

    def tell(self, kind: str, response: Json, *, is_last: bool = False) -> None:
        """Add an event about the response as a whole."""
        self._add([event_of(kind, response, len(self.events))], is_last=is_last)

    async def send_events(self, events: bytes, *, is_last: bool = False) -> None:
        """Take events, in one piece as they would go out; comments are left out."""
        pieces = [it for it in events.split(b"\n\n") if it and not it.startswith(b":")]
        self._add([piece + b"\n\n" for piece in pieces], is_last=is_last)

    async def follow(self, start: int) -> AsyncIterator[bytes]:
        """Yield events from a number on, as they come, until the last."""
        while True:
            news = self._news
            if start < len(self.events):
                yield b"".join(self.events[start:])
                start = len(self.events)
            elif self.is_over:
                return
            else:
                try:
                    async with asyncio.timeout(self._keep_alive_s):
                        await news.wait()
                except TimeoutError:
                    yield KEEP_ALIVE

    def _add(self, events: list[bytes], *, is_last: bool) -> None:
        self.events += events
        self.num_events = len(self.events)
        self.is_over = self.is_over or is_last
        news, self._news = self._news, asyncio.Event()
        news.set()


def event_of(kind: str, response: Json, number: int) -> bytes:
    """Return an event that carries the whole response."""
    data = {"type": kind, "sequence_number": number, "response": response}
    return named_event(kind, orjson.dumps(data))
