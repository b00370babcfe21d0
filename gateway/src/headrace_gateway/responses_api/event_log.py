"""The events of a background response, for whoever reads along and for whoever comes back.

An event's `sequence_number` is its place. The process that makes a response has its events in
memory; the state gets them in pieces, so that any process of the gateway can tell them, and any
time until the response is forgotten. None is told before it is in the state: whoever goes on with
the response after a crash goes on from there (`resumed_log`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import orjson

from headrace_gateway.answer_extras import Json
from headrace_gateway.captured_exchange import CapturedExchange
from headrace_gateway.event_stream import named_event
from headrace_gateway.responses_api.sink import KEEP_ALIVE


class EventLog(CapturedExchange):
    """Takes the events of one response. Bounded by the request's output tokens.

    Args:
        response_id: whose events.
        keep_alive_s: who reads along is sent a comment after so much silence.
        attempt: of those to make this response.
    """

    def __init__(self, response_id: str, keep_alive_s: float, attempt: int = 1) -> None:
        super().__init__()
        self.response_id, self.attempt = response_id, attempt
        self._keep_alive_s = keep_alive_s
        self.events: list[bytes] = []
        # Of `events`, those that are in the state.
        self.num_kept = 0
        # Whether another process makes this response now: nothing is kept here any more.
        self.is_left = False
        self._news = asyncio.Event()
        # Called when there are events to keep.
        self.on_news: Callable[[], None] = _nothing

    @property
    def is_kept(self) -> bool:
        """Whether nothing is left to be written."""
        return self.is_left or self.num_kept == len(self.events)

    def tell(self, kind: str, response: Json, *, is_last: bool = False) -> None:
        """Add an event about the response as a whole."""
        self._add([event_of(kind, response, len(self.events))], is_last=is_last)

    async def send_events(self, events: bytes, *, is_last: bool = False) -> None:
        """Take events, in one piece as they would go out; comments are left out."""
        self._add(pieces_of(events), is_last=is_last)

    def note_kept(self, num_kept: int) -> None:
        """Say that the first so many events are in the state."""
        self.num_kept = num_kept
        self._wake()

    def leave(self) -> None:
        """Say that what comes next is told by another process."""
        self.is_left = True
        self._wake()

    async def follow(self, start: int) -> AsyncIterator[bytes]:
        """Yield events from a number on, as they are kept, until the last or until it is left."""
        while True:
            news = self._news
            if start < self.num_kept:
                told, start = self.events[start : self.num_kept], self.num_kept
                yield b"".join(told)
            elif self.is_left or (self.is_over and self.is_kept):
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
        self._wake()
        self.on_news()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def _nothing() -> None:
    pass


def pieces_of(events: bytes) -> list[bytes]:
    """Cut events that stand one behind the other into single ones; comments are left out."""
    pieces = [it for it in events.split(b"\n\n") if it and not it.startswith(b":")]
    return [piece + b"\n\n" for piece in pieces]


def event_of(kind: str, response: Json, number: int) -> bytes:
    """Return an event that carries the whole response."""
    data = {"type": kind, "sequence_number": number, "response": response}
    return named_event(kind, orjson.dumps(data))
