"""Deadlines of many waits that nearly all end in time, at a fifth of what the loop's timers cost.

To set and to cancel a timer of uvloop's costs 5 us, and a request of the gateway had six of them.
Here waits whose time is up together stand in one set, and one timer rings for the earliest set. So
a deadline comes up to 10 ms late; one of more than ten seconds, up to a quarter of a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush

_TICKS_PER_S = 100
_LONG_S, _TICKS_OF_LONG = 10.0, 25

# What is called when the time is up. To cancel, discard it from the set.
Waits = set[Callable[[], None]]


class Deadlines:
    """Calls back when time is up. Belongs to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # By the tick at which they ring.
        self._sets: dict[int, Waits] = {}
        self._ticks: list[int] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, delay_s: float, callback: Callable[[], None]) -> Waits:
        """Call back after this time, once, unless it is discarded from the returned set before.

        A callback must be one of its own: an equal one in the same set would be the same.
        """
        tick = int((self._loop.time() + delay_s) * _TICKS_PER_S) + 1
        if delay_s > _LONG_S:
            tick += -tick % _TICKS_OF_LONG
        waits = self._sets.get(tick)
        if waits is None:
            waits = self._sets[tick] = set()
            heappush(self._ticks, tick)
            if self._ticks[0] == tick:
                self._set_timer()
        waits.add(callback)
        return waits

    def close(self) -> None:
        """Ring no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._sets.clear()
        self._ticks.clear()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._ticks[0] / _TICKS_PER_S, self._ring)

    def _ring(self) -> None:
        now_ticks = self._loop.time() * _TICKS_PER_S
        try:
            while self._ticks and self._ticks[0] <= now_ticks:
                waits = self._sets[self._ticks[0]]
                while waits:
                    waits.pop()()
                del self._sets[heappop(self._ticks)]
            # Sets whose waits have all ended need no ringing.
            while self._ticks and not self._sets[self._ticks[0]]:
                del self._sets[heappop(self._ticks)]
        finally:
            if self._ticks:
                self._set_timer()
