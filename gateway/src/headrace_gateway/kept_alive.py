"""When a stream gets comments: while it is open and silent, and before that as late as can be.

::

    waits for a replica or a worker ......... nothing is sent; a refusal has its real status
    silent_start_s ................... ...... opened by a comment, whoever is silent
    a worker has begun ...................... open; a comment after each keep_alive_s of silence

A comment is a first byte: after it a refusal can only be an event (ADR 0038).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from headrace_common.clock import Clock
from headrace_common.lifecycle import cancel_and_wait
from headrace_gateway.answer import Sink
from headrace_gateway.visit import Exchange


class KeptAlive:
    """Keeps one stream alive while its block runs.

    Args:
        sink: sends the comments.
        exchange: says whether the stream is open.
        clock: time.
        open_by_s: monotonic time at which a comment opens it.
        every_s: longest silence of an open one.
        before_first: awaited before the first comment.
    """

    __slots__ = (
        "_before_first",
        "_clock",
        "_every_s",
        "_exchange",
        "_open_by_s",
        "_sink",
        "_task",
        "_timer",
    )

    def __init__(
        self,
        sink: Sink,
        exchange: Exchange,
        clock: Clock,
        open_by_s: float,
        every_s: float,
        before_first: Callable[[], Awaitable[None]],
    ) -> None:
        self._sink, self._exchange, self._clock = sink, exchange, clock
        self._open_by_s, self._every_s, self._before_first = open_by_s, every_s, before_first
        self._timer: asyncio.TimerHandle | None = None
        # Most answers are over before the first comment is due.
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._look_later()

    async def __aexit__(self, *exc_info: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            await cancel_and_wait(self._task)

    def _look_later(self) -> None:
        delay_s = max(0.0, min(self._every_s, self._open_by_s - self._clock.now_s()))
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._exchange.has_begun or self._clock.now_s() >= self._open_by_s:
            self._task = asyncio.create_task(self._send_comments())
        else:
            self._look_later()

    async def _send_comments(self) -> None:
        await self._before_first()
        await self._sink.keep_alive(self._every_s)
