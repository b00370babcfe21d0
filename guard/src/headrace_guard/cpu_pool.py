"""Threads for long texts, so that they do not stop the event loop; tenants share them fairly.

What is done on the loop in many short steps lets others run between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import TypeVar

from prometheus_client import Gauge

from headrace_common.fair_places import FairPlaces, FairThreads

T = TypeVar("T")
# Longer texts go to a thread: this much takes about a millisecond.
INLINE_CHARS = 4096


# After so long others get a turn.
_STRETCH_S = 0.001


class Turns:
    """Shares the loop with others during work of many steps."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._since_s = self._loop.time()

    async def pass_on(self) -> None:
        """Let others run, if the steps since they last did took long."""
        if self._loop.time() - self._since_s >= _STRETCH_S:
            await asyncio.sleep(0)
            self._since_s = self._loop.time()


class CpuPool:
    """A few threads with a bounded queue, and the event loop for short texts. Used from that loop.

    Args:
        num_threads: texts judged at a time. RE2 lets go of the interpreter's lock while it matches.
        max_waiting: texts that may wait beside those.
        waiting: shows how many are here.
    """

    def __init__(self, num_threads: int, max_waiting: int, waiting: Gauge) -> None:
        self._threads = FairThreads(num_threads, "guard", max_waiting, waiting.set)
        self._loop = FairPlaces(1)

    async def run(
        self, whose: Hashable, num_chars: int, work: Callable[[], T], *, goes_on: bool = False
    ) -> T:
        """Run *work* on a thread. A caller that leaves does not stop it: work bounds its own time.

        Args:
            whose: tenants are told apart by it, and what is theirs.
            num_chars: how much text it is.
            work: what to do.
            goes_on: this text had a thread before; what was begun is ended before more is begun.

        Raises:
            NoPlaceError: too many wait, and nobody has more of them; nothing was done.
        """
        return await self._threads.run(whose, num_chars, work, goes_on=goes_on)

    async def run_long(self, whose: Hashable, num_chars: int, work: Callable[[], T]) -> T:
        """Run *work* here when it is this tenant's turn if the text is short, else on a thread.

        Raises:
            NoPlaceError: see `run`.
        """
        if num_chars > INLINE_CHARS:
            return await self.run(whose, num_chars, work)
        await self._loop.take(whose, num_chars + 1)
        try:
            # Whose message has come as well gets into the queue, so that there are turns to take.
            await asyncio.sleep(0)
            return work()
        finally:
            self._loop.give_back(whose)

    def close(self) -> None:
        """Wait for running work and let the threads go."""
        self._threads.close()
