"""Threads for long texts, so that they do not stop the event loop; a full queue refuses.

What is done on the loop in many short steps lets others run between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from prometheus_client import Gauge

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


class OverloadedError(Exception):
    """Too many long texts wait already."""


class CpuPool:
    """A few threads with a bounded queue. Used from one event loop.

    Args:
        num_threads: texts judged at a time. RE2 lets go of the interpreter's lock while it matches.
        max_waiting: texts that may wait beside those.
        waiting: shows how many are here.
    """

    def __init__(self, num_threads: int, max_waiting: int, waiting: Gauge) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="guard")
        self._most = num_threads + max_waiting
        self._waiting = waiting
        self._num_here = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Run *work* on a thread. A caller that leaves does not stop it: work bounds its own time.

        Raises:
            OverloadedError: the queue is full; nothing was done.
        """
        if self._num_here >= self._most:
            raise OverloadedError
        self._change(1)
        job = asyncio.get_running_loop().run_in_executor(self._threads, work)
        job.add_done_callback(lambda _: self._change(-1))
        return await asyncio.shield(job)

    async def run_long(self, num_chars: int, work: Callable[[], T]) -> T:
        """Run *work* on a text of so many characters: a short one here, a long one on a thread.

        Raises:
            OverloadedError: see `run`.
        """
        return work() if num_chars <= INLINE_CHARS else await self.run(work)

    def close(self) -> None:
        """Wait for running work and let the threads go."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _change(self, by: int) -> None:
        self._num_here += by
        self._waiting.set(self._num_here)
