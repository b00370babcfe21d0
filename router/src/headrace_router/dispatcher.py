"""Drives the desk from the event loop: futures for those who wait, a pass when something changes.

A pass over the queues runs at most every few milliseconds, however many changes come.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

from headrace_common.clock import Clock
from headrace_common.errors import HeadraceError
from headrace_contracts.router.v1.router_pb2 import PickProgress
from headrace_router.candidate import Query
from headrace_router.desk import Outcome, PickDesk, Ticket
from headrace_router.pick import Choice

# Time between two passes over the queues.
_MIN_PASS_S = 0.003
# A pass without any change: reports grow stale by time alone.
_IDLE_PASS_S = 0.25


class PendingPick:
    """A ticket whose outcome can be awaited. `close` must be called, whatever happens.

    Args:
        desk: where the request goes.
        query: the request.
        max_wait_s: longest wait in the queue; None = the file's.

    Raises:
        HeadraceError: no replica, no such model, or the queue is full.
    """

    def __init__(self, desk: PickDesk, query: Query, max_wait_s: float | None) -> None:
        self.picked: asyncio.Future[Choice] = asyncio.get_running_loop().create_future()
        try:
            # The ticket knows the future and not us, so that all goes with the last who knows us.
            settle = partial(_settle, self.picked)
            self._ticket: Ticket = desk.submit(query, max_wait_s, settle)
        except HeadraceError:
            self.picked.cancel()
            raise

    @property
    def queue_s(self) -> float:
        """Time spent in the queue."""
        return self._ticket.queue_s

    def progress(self, message: PickProgress) -> None:
        """Take a report of how the request goes on."""
        self._ticket.progress(message)

    def close(self) -> None:
        """Leave the queue or give the load back, once. Idempotent."""
        self.picked.cancel()
        if self.picked.done() and not self.picked.cancelled():
            # Marks an exception that nobody awaited as seen.
            self.picked.exception()
        self._ticket.close()


def _settle(picked: asyncio.Future[Choice], outcome: Outcome) -> None:
    if picked.done():
        return
    if isinstance(outcome, HeadraceError):
        picked.set_exception(outcome)
    else:
        picked.set_result(outcome)


class Dispatcher:
    """Runs a desk.

    Args:
        desk: queues and picks.
        clock: time.
    """

    def __init__(self, desk: PickDesk, clock: Clock) -> None:
        self.desk, self._clock = desk, clock
        self._changed = asyncio.Event()
        desk.on_change(self._changed.set)

    def submit(self, query: Query, max_wait_s: float | None) -> PendingPick:
        """Pick at once or queue; `picked` of the answer tells.

        Raises:
            HeadraceError: no replica, no such model, or the queue is full.
        """
        return PendingPick(self.desk, query, max_wait_s)

    async def run(self) -> None:
        """Release waiting requests as replicas come free, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._time_to_next_pass_s()):
                    await self._changed.wait()
            self._changed.clear()
            self.desk.release_all()
            await asyncio.sleep(_MIN_PASS_S)

    def _time_to_next_pass_s(self) -> float | None:
        first = self.desk.next_deadline_s()
        if first is None:
            return None
        look_s = self.desk.next_look_s()
        wait_s = _IDLE_PASS_S if look_s is None else max(look_s - _MIN_PASS_S, 0.0)
        return min(first - self._clock.now_s(), wait_s)
