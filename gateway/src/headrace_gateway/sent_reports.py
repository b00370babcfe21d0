"""Tells the guard how much text went to each client: the second witness beside its own count.

In the background and bounded: while the guard is away reports wait; beyond the bound the oldest are
dropped and counted. No answer waits for a report.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from headrace_common.errors import HeadraceError
from headrace_contracts.guard.v1.guard_pb2 import SentReport
from headrace_gateway.metrics import GatewayMetrics
from headrace_gateway.visit import Visit

MAX_WAITING = 10_000
_RETRY_S = 1.0
# In one call.
_MAX_SENT = 500


class ReportTaker(Protocol):
    """What the guard offers here."""

    async def report_sent(self, reports: Sequence[SentReport]) -> None:
        """Take reports."""
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

    def tell(self, visit: Visit) -> None:
        """Queue the report of a request that has ended, if its answer had begun."""
        if visit.delivery is None:
            return
        report = SentReport(
            request_id=visit.request_id,
            tenant_id=visit.principal.tenant_id,
            key_id=visit.principal.key_id,
            sent_chars=sum(visit.delivery.sent_chars.values()),
            sent_chars_by_choice=visit.delivery.sent_chars,
            fail_open=visit.delivery.went_unguarded,
            guard_lost=visit.delivery.lost_the_guard,
        )
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
                    await self._send_some()
                except HeadraceError:
                    await asyncio.sleep(_RETRY_S)

    async def flush(self, within_s: float) -> None:
        """Give waiting reports a last chance, once `run` has ended."""
        try:
            async with asyncio.timeout(within_s):
                while self._waiting:
                    await self._send_some()
        except (TimeoutError, HeadraceError):
            self._metrics.sent_reports_dropped.inc(len(self._waiting))
            self._waiting.clear()

    async def _send_some(self) -> None:
        """Send what waits, up to a bound; what was dropped meanwhile is not dropped again."""
        reports = list(islice(self._waiting, _MAX_SENT))
        await self._guard.report_sent(reports)
        for report in reports:
            if self._waiting and self._waiting[0] is report:
                self._waiting.popleft()
