"""Closes requests that nobody closed: a gateway died and its outbox with it, or never came back.

The workers' counts are kept for that; once nothing is left to close, old ones are deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from sqlalchemy import Connection, select

from headrace_billing import schema
from headrace_billing.bookkeeper import BatchResult, Bookkeeper
from headrace_billing.deliveries import forget_witnesses
from headrace_billing.ledger import OPENED, swept
from headrace_billing.metrics import BillingMetrics
from headrace_billing.open_requests import count_open
from headrace_billing.store import Database
from headrace_common.clock import Clock, unix_us
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent

MAX_SWEPT_AT_ONCE = 200
_MAX_FORGOTTEN_AT_ONCE = 2000
_US_PER_DAY = 86_400 * 1_000_000


class Sweeper:
    """Books `ENDING_SWEPT` for open requests whose deadline and grace have passed.

    It waits until the consumers have been at the end of the log for the whole grace: after an
    outage a close may still be on its way.

    Args:
        database: where the books are.
        bookkeeper: books what is swept, as it books everything else.
        caught_up_for_s: how long no consumer has had anything left to read.
        clock: time.
        metrics: where to count.
        grace_s: time after the deadline.
        interval_s: pause between two looks.
        witness_days: how long workers' counts are kept.
    """

    def __init__(
        self,
        database: Database,
        bookkeeper: Bookkeeper,
        caught_up_for_s: Callable[[], Awaitable[float]],
        clock: Clock,
        metrics: BillingMetrics,
        *,
        grace_s: float,
        interval_s: float,
        witness_days: int,
    ) -> None:
        self._database = database
        self._bookkeeper = bookkeeper
        self._caught_up_for_s = caught_up_for_s
        self._clock = clock
        self._metrics = metrics
        self._grace_s = grace_s
        self._interval_s = interval_s
        self._witness_days = witness_days

    async def run(self) -> None:
        """Sweep for ever.

        Raises:
            Unavailable: the database cannot answer.
        """
        while True:
            await self.sweep()
            await asyncio.sleep(self._interval_s)

    async def sweep(self) -> int:
        """Close what is due; return how many requests that were.

        Raises:
            Unavailable: the database cannot answer.
        """
        self._metrics.open_requests.set(await self._database.read(count_open))
        swept_total = 0
        while 0 < await self._caught_up_for_s() >= self._grace_s:
            result = await self._database.write(self._sweep_some)
            if result.closed + result.duplicates == 0:
                await self._forget_witnesses()
                break
            self._metrics.count(result, "sweeper")
            swept_total += result.closed
        return swept_total

    async def _forget_witnesses(self) -> None:
        before_us = max(0, unix_us(self._clock) - self._witness_days * _US_PER_DAY)
        forget = partial(forget_witnesses, before_unix_us=before_us, limit=_MAX_FORGOTTEN_AT_ONCE)
        while await self._database.write(forget):
            pass

    def _sweep_some(self, connection: Connection) -> BatchResult:
        now_us = unix_us(self._clock)
        due_us = now_us - round(self._grace_s * 1e6)
        events, open_requests = schema.usage_events, schema.open_requests
        query = (
            select(events.c.payload)
            .join(open_requests, open_requests.c.request_id == events.c.request_id)
            .where(events.c.kind == OPENED, open_requests.c.deadline_unix_us < due_us)
            .order_by(open_requests.c.deadline_unix_us)
            .limit(MAX_SWEPT_AT_ONCE)
        )
        due = [UsageEvent.FromString(it) for it in connection.execute(query).scalars()]
        closes = [swept(opened, now_us) for opened in due]
        return self._bookkeeper.book_swept(connection, closes, now_us // 1_000_000)
