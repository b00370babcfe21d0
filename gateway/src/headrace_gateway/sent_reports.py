"""Tells the guard how much text went to each client: the second witness beside its own count.

In the background and bounded: while the guard is away reports wait; beyond the bound the oldest are
dropped and counted. No answer waits for a report.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from headrace_common.errors import HeadraceError
from headrace_contracts.guard.v1.guard_pb2 import SentReport
from headrace_gateway.metrics import GatewayMetrics

MAX_WAITING = 10_000
_RETRY_S = 1.0


class ReportTaker(Protocol):
    """What the guard offers here."""

    async def report_sent(self, report: SentReport) -> None:
        """Take a report."""
        ...


class SentReports:
    """Queue and sender. Belongs to one event loop.

    Args:
        guard: takes the reports.
        metrics: counts those that were lost.
    """

    def __init__(self, guard: ReportTaker, metrics: GatewayMetrics) -> None:
        self._guard, self._metrics = guard, metrics
        self._waiting: deque[SentReport] = deque()
        self._filled = asyncio.Event()

    def add(self, report: SentReport) -> None:
        """Queue a report; never waits."""
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self._metrics.sent_reports_dropped.inc()
        self._waiting.append(report)
        self._filled.set()

    async def run(self) -> None:
        """Send until cancelled; a guard that is away is tried again."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._waiting:
                try:
                    await self._send_first()
                except HeadraceError:
                    await asyncio.sleep(_RETRY_S)

    async def flush(self, within_s: float) -> None:
        """Give waiting reports a last chance, once `run` has ended."""
        try:
            async with asyncio.timeout(within_s):
                while self._waiting:
                    await self._send_first()
        except (TimeoutError, HeadraceError):
            self._metrics.sent_reports_dropped.inc(len(self._waiting))
            self._waiting.clear()

    async def _send_first(self) -> None:
        report = self._waiting[0]
        await self._guard.report_sent(report)
        if self._waiting and self._waiting[0] is report:
            self._waiting.popleft()
