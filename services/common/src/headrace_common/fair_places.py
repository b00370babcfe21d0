"""Places for work that tenants share: who was served least is next, and nobody fills the queue.

Start-time fair queueing, told at the head of each tenant's queue (Goyal, Vin, Cheng, "Start-time
Fair Queuing", SIGCOMM 1996): each tenant counts the work that was begun for it, and who comes back
after a pause begins at the count of the one begun last, so that idling saves nothing up. When the
queue is full, the tenant with most in it loses its newest to one that has fewer. What runs is not
stopped: where it may run for long, no tenant may hold all places.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
# Counts that are kept before those that say nothing any more are dropped.
_MAX_COUNTS = 1024


class NoPlaceError(Exception):
    """The queue is full, and nobody else has more in it."""


@dataclass(slots=True, eq=False)
class _Waiting:
    size: float
    given: asyncio.Future[None]


class FairPlaces:
    """A bounded number of places at a time, and a queue before them. Belongs to one event loop.

    Args:
        num_places: how much may run at a time.
        max_waiting: how much may wait beside that; None = as much as comes.
        most_each: places that one may hold at a time; None = all of them.
        on_change: told how many run or wait, whenever that changes.
    """

    def __init__(
        self,
        num_places: int,
        max_waiting: int | None = None,
        most_each: int | None = None,
        on_change: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._num_places, self._max_waiting, self._on_change = num_places, max_waiting, on_change
        self._most_each = most_each or num_places
        self._held: Counter[Hashable] = Counter()
        self._num_waiting = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self._waiting: dict[Hashable, deque[_Waiting]] = {}
        # Work begun for each; of whom it is not told, no more than for the one begun last.
        self._begun: dict[Hashable, float] = {}
        self._begun_last = 0.0

    async def take(self, whose: Hashable, size: float = 1.0, *, goes_on: bool = False) -> None:
        """Wait for a place; who leaves before has none, everybody else gives it back.

        Args:
            whose: tenants are told apart by it.
            size: of the work, above 0, in any unit that is the same for all.
            goes_on: with what had a place before: it comes before the tenant's own new work, and is
                not refused for a full queue.

        Raises:
            NoPlaceError: see there.
        """
        if self._may_begin(whose):
            self._begin(whose, size)
            self._tell()
            return
        if not goes_on:
            self._make_room(whose)
        waiting = _Waiting(size, asyncio.get_running_loop().create_future())
        self._enqueue(whose, waiting, goes_on=goes_on)
        try:
            await waiting.given
        except asyncio.CancelledError:
            if waiting.given.cancelled():
                self._dequeue(whose, waiting)
                self._tell()
            elif waiting.given.exception() is None:
                self.give_back(whose)
            raise

    @asynccontextmanager
    async def place(self, whose: Hashable, size: float = 1.0) -> AsyncIterator[None]:
        """`take` a place for as long as this lasts."""
        await self.take(whose, size)
        try:
            yield
        finally:
            self.give_back(whose)

    def give_back(self, whose: Hashable) -> None:
        """End the use of a place: the next begins."""
        self._held[whose] -= 1
        if not self._held[whose]:
            del self._held[whose]
        while able := [one for one in self._waiting if self._may_begin(one)]:
            # Of those served alike the one that came first: a dict keeps that order.
            following = min(able, key=self._begun.__getitem__)
            waiting = self._waiting[following][0]
            self._dequeue(following, waiting)
            # Who leaves in this very turn of the loop has not taken itself out yet.
            if not waiting.given.cancelled():
                self._begin(following, waiting.size)
                waiting.given.set_result(None)
        if not self._held:
            self._begun.clear()
            self._begun_last = 0.0
        self._tell()

    async def until_unused(self) -> None:
        """Wait until nothing runs or waits."""
        await self._unused.wait()

    def close(self) -> None:
        """Cancel all who wait."""
        for queue in self._waiting.values():
            for waiting in queue:
                waiting.given.cancel()

    def _may_begin(self, whose: Hashable) -> bool:
        return self._held.total() < self._num_places and self._held[whose] < self._most_each

    def _begin(self, whose: Hashable, size: float) -> None:
        self._held[whose] += 1
        self._begun_last = max(self._begun_last, self._begun.get(whose, 0.0))
        self._begun[whose] = self._begun_last + size

    def _enqueue(self, whose: Hashable, waiting: _Waiting, *, goes_on: bool) -> None:
        if whose not in self._waiting:
            self._waiting[whose] = deque()
            self._begun[whose] = max(self._begun_last, self._begun.get(whose, 0.0))
            self._forget()
        if goes_on:
            self._waiting[whose].appendleft(waiting)
        else:
            self._waiting[whose].append(waiting)
        self._num_waiting += 1
        self._tell()

    def _dequeue(self, whose: Hashable, waiting: _Waiting) -> None:
        queue = self._waiting.get(whose)
        if queue is None or waiting not in queue:
            return
        queue.remove(waiting)
        self._num_waiting -= 1
        if not queue:
            del self._waiting[whose]

    def _make_room(self, whose: Hashable) -> None:
        if self._max_waiting is None or self._num_waiting < self._max_waiting:
            return
        most = max(self._waiting, key=lambda one: len(self._waiting[one]), default=whose)
        others = self._waiting.get(most)
        if others is None or len(others) <= len(self._waiting.get(whose, ())) + 1:
            raise NoPlaceError
        newest = others[-1]
        self._dequeue(most, newest)
        if not newest.given.cancelled():
            newest.given.set_exception(NoPlaceError())

    def _forget(self) -> None:
        if len(self._begun) > _MAX_COUNTS:
            self._begun = {
                whose: begun
                for whose, begun in self._begun.items()
                if begun > self._begun_last or whose in self._waiting
            }

    def _tell(self) -> None:
        num_here = self._num_waiting + self._held.total()
        if num_here:
            self._unused.clear()
        else:
            self._unused.set()
        self._on_change(num_here)


class FairThreads:
    """A few threads behind such places. Belongs to one event loop.

    Args:
        num_threads: threads.
        name: of the threads.
        max_waiting: work that may wait for one; None = as much as comes.
        on_change: told how much runs or waits, whenever that changes.

    One of several threads is left to others, whoever floods.
    """

    def __init__(
        self,
        num_threads: int,
        name: str,
        max_waiting: int | None = None,
        on_change: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        most_each = max(1, num_threads - 1)
        self._places = FairPlaces(num_threads, max_waiting, most_each, on_change)

    async def run(
        self, whose: Hashable, size: float, work: Callable[[], T], *, goes_on: bool = False
    ) -> T:
        """Run *work* on a thread. Who leaves while it runs does not stop it: it keeps its place.

        Args:
            whose: see `FairPlaces.take`.
            size: see there.
            work: what to do.
            goes_on: see there.

        Raises:
            NoPlaceError: nothing was done.
        """
        await self._places.take(whose, size, goes_on=goes_on)
        job = asyncio.get_running_loop().run_in_executor(self._threads, work)
        job.add_done_callback(lambda _: self._places.give_back(whose))
        return await asyncio.shield(job)

    async def finish(self) -> None:
        """Wait until all is done, then let the threads go."""
        await self._places.until_unused()
        self._threads.shutdown()

    def close(self, *, wait: bool = True) -> None:
        """Let the threads go once what runs has ended; who waits is cancelled.

        Args:
            wait: for what runs.
        """
        self._places.close()
        self._threads.shutdown(wait=wait, cancel_futures=True)
