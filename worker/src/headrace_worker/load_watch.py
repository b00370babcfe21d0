"""Load reports to a watcher: at once, at each change, and at least every interval."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from headrace_contracts.worker.v1 import worker_pb2 as pb

_DEFAULT_INTERVAL_S = 0.25
# Shortest time between two load reports to one watcher.
_MIN_GAP_S = 0.02


class ChangeSignal:
    """Wakes all who wait for a change. Belongs to one event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wake all who wait."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def wait(self, within_s: float) -> Coroutine[Any, Any, None]:  # Any: asyncio's own
        """Return what waits for the next change after this call, or until the time is over."""
        return _until(self._changed, within_s)


async def _until(changed: asyncio.Event, within_s: float) -> None:
    try:
        async with asyncio.timeout(within_s):
            await changed.wait()
    except TimeoutError:
        return


async def load_reports(
    request: pb.WatchLoadRequest, signal: ChangeSignal, report: Callable[[], pb.LoadReport]
) -> AsyncIterator[pb.LoadReport]:
    """Report for ever; changes of one moment share a report.

    Args:
        request: how often at least.
        signal: told of changes.
        report: makes a report.
    """
    interval_s = request.interval_ms / 1000 or _DEFAULT_INTERVAL_S
    while True:
        # Before the report: a change while it is being sent is not missed.
        waiting = asyncio.ensure_future(signal.wait(interval_s))
        try:
            yield report()
            await waiting
        finally:
            waiting.cancel()
        await asyncio.sleep(min(_MIN_GAP_S, interval_s))
