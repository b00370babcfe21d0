"""What goes on when its request is over, and what no cancellation of the request may reach."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from headrace_gateway.metrics import GatewayMetrics

_log = logging.getLogger(__name__)


class Closings:
    """Records on their way to disk and leases on their way back. Belongs to one event loop.

    Args:
        metrics: records that the disk did not take are counted.
    """

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        # Any: their results matter to nobody.
        self._under_way: set[asyncio.Future[Any]] = set()

    def keep(self, work: asyncio.Future[Any]) -> asyncio.Future[Any]:
        """Hold work until it has ended, and return it."""
        self._under_way.add(work)
        work.add_done_callback(self._under_way.discard)
        return work

    def until_recorded(
        self, request_id: str, recorded: asyncio.Future[None]
    ) -> asyncio.Future[None]:
        """Return what can be awaited, and cancelled, without cancelling the record."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._under_way.add(recorded)

        def note(_: object) -> None:
            self._under_way.discard(recorded)
            if not recorded.cancelled() and (error := recorded.exception()) is not None:
                # Kept in memory and written once the disk takes it; the answer is complete.
                self._metrics.degraded.labels("outbox").inc()
                _log.warning("%s is closed, not yet on disk: %s", request_id, error)
            if not ended.done():
                ended.set_result(None)

        recorded.add_done_callback(note)
        return ended

    async def drain(self) -> None:
        """Wait until everything that ended is closed."""
        while self._under_way:
            await asyncio.wait(self._under_way)


async def wait_at_most(work: asyncio.Future[Any], longest_s: float) -> None:
    """Wait for what goes on if the waiter is cancelled. Cheaper than `asyncio.wait`."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    timer = loop.call_later(longest_s, wake)
    work.add_done_callback(wake)
    try:
        await waiter
    finally:
        timer.cancel()
