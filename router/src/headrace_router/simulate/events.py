"""Simulated time: events in order, and the clock that production code reads."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class EventQueue:
    """What happens when. It is the clock as well."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def now_s(self) -> float:
        """Simulated seconds since the start."""
        return self._now_s

    def unix_s(self) -> float:
        """The simulation begins with the epoch."""
        return self._now_s

    def at(self, when_s: float, what: Callable[[], None]) -> None:
        """Do something later; what is due at the same time happens in the order of calls."""
        self._number += 1
        heapq.heappush(self._events, (max(when_s, self._now_s), self._number, what))

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        """Do something after a delay."""
        self.at(self._now_s + delay_s, what)

    def step(self) -> bool:
        """Let the next event happen; tell whether there was one."""
        if not self._events:
            return False
        self._now_s, _, what = heapq.heappop(self._events)
        what()
        return True
