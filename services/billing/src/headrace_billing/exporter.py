"""Sends closed requests to a metering service, each until it is acknowledged.

Which requests are still to be sent is a table, filled in the transaction that books them (and, at
the start, with whatever was booked before there was an exporter). A request is crossed out after
the receiver took it: a crash in between sends it again, under the same name. One that the receiver
refuses (too old for it, or a customer it does not know) holds up no other: it is set aside for an
hour.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
from sqlalchemy import Connection, bindparam, func, insert, literal, select, update

from headrace_billing import schema
from headrace_billing.export_format import (
    CLOUD_EVENTS_BATCH,
    FORM,
    Dialect,
    cloud_events,
    stripe_forms,
)
from headrace_billing.ledger import CLOSED
from headrace_billing.metrics import BillingMetrics
from headrace_billing.store import Database
from headrace_common.clock import Clock
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent

_log = logging.getLogger(__name__)
_BATCH_EVENTS = 100
_TIMEOUT_S = 10.0
_IDLE_S = 1.0
# Said by a receiver that has the event already.
_KNOWN_STATUSES = (409,)
# Said of what was sent; everything else is about the receiver or the way to it.
_REFUSED_STATUSES = (400, 413, 422)
_REFUSED_FOR_S = 3600.0
_MAX_REFUSED = 10_000

# Closed requests with their amounts.
_Batch = Sequence[tuple[UsageEvent, int]]


class ExportError(Exception):
    """The receiver did not take a batch; it will be sent again."""


class EventRefusedError(ExportError):
    """The receiver will have none of what was sent."""


@dataclass(frozen=True)
class ExportTarget:
    """Where events go.

    Attributes:
        source: CloudEvents' `source`, the same for all processes of an installation; for Stripe the
            prefix of the meters' names.
    """

    url: str
    dialect: Dialect
    token: str
    source: str


class Exporter:
    """Runs beside the consumer. Several over one database only send some events twice."""

    def __init__(
        self, database: Database, target: ExportTarget, clock: Clock, metrics: BillingMetrics
    ) -> None:
        self._database = database
        self._target = target
        self._clock = clock
        self._metrics = metrics
        # Request id -> monotonic time until which it is not tried.
        self._refused: dict[str, float] = {}

    async def run(self) -> None:
        """Send for ever.

        Raises:
            Unavailable: the database cannot answer.
            ExportError: the receiver did not take a batch.
            httpx.HTTPError: likewise.
        """
        await self._database.write(_add_earlier)
        headers = {"authorization": f"Bearer {self._target.token}"} if self._target.token else {}
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, headers=headers) as http:
            while True:
                if not await self.send_some(http):
                    await asyncio.sleep(_IDLE_S)

    async def send_some(self, http: httpx.AsyncClient) -> int:
        """Send one batch; return how many requests that were, sent or refused.

        Raises:
            ExportError: the receiver took none of it.
            httpx.HTTPError: likewise.
        """
        self._metrics.export_waiting.set(await self._database.read(_count_waiting))
        now_s = self._clock.now_s()
        self._refused = {key: until for key, until in self._refused.items() if until > now_s}
        self._metrics.export_refused.set(len(self._refused))
        aside = list(self._refused)
        batch = await self._database.read(lambda it: _next_batch(it, aside))
        if batch:
            try:
                await self._send(http, batch)
            except EventRefusedError:
                await self._send_alone(http, batch)
        return len(batch)

    async def _send_alone(self, http: httpx.AsyncClient, batch: _Batch) -> None:
        for one in batch:
            try:
                await self._send(http, [one])
            except EventRefusedError as error:
                if len(self._refused) >= _MAX_REFUSED:
                    raise
                request_id = one[0].request_id
                _log.warning("request %s is not metered: %s", request_id, error)
                self._refused[request_id] = self._clock.now_s() + _REFUSED_FOR_S

    async def _send(self, http: httpx.AsyncClient, batch: _Batch) -> None:
        if self._target.dialect is Dialect.CLOUD_EVENTS:
            body = cloud_events(batch, self._target.source)
            await self._post(http, body, {"content-type": CLOUD_EVENTS_BATCH})
        else:
            for event, amount in batch:
                for identifier, form in stripe_forms(event, amount, self._target.source):
                    headers = {"content-type": FORM, "idempotency-key": identifier}
                    await self._post(http, form, headers)
        now_unix_s = int(self._clock.unix_s())
        ids = [event.request_id for event, _ in batch]
        await self._database.write(lambda it: _cross_out(it, ids, now_unix_s))
        self._metrics.exported.inc(len(batch))

    async def _post(self, http: httpx.AsyncClient, body: bytes, headers: dict[str, str]) -> None:
        answer = await http.post(self._target.url, content=body, headers=headers)
        if answer.status_code in _REFUSED_STATUSES:
            raise EventRefusedError(f"{self._target.url} answered {answer.status_code}")
        if not answer.is_success and answer.status_code not in _KNOWN_STATUSES:
            raise ExportError(f"{self._target.url} answered {answer.status_code}")


def _add_earlier(connection: Connection) -> None:
    table, entries = schema.exports, schema.entries
    known = select(table.c.request_id).where(table.c.request_id == entries.c.request_id)
    missing = select(entries.c.request_id, literal(0)).where(~known.exists())
    connection.execute(insert(table).from_select(["request_id", "exported_unix_s"], missing))


def _count_waiting(connection: Connection) -> int:
    query = select(func.count()).where(schema.exports.c.exported_unix_s == 0)
    return connection.execute(query).scalar_one()


def _next_batch(connection: Connection, aside: Sequence[str]) -> _Batch:
    events, table = schema.usage_events, schema.exports
    query = (
        select(events.c.payload, events.c.amount_nano_usd)
        .join(table, table.c.request_id == events.c.request_id)
        .where(table.c.exported_unix_s == 0, events.c.kind == CLOSED)
        .where(events.c.request_id.not_in(aside))
        .order_by(events.c.request_id)
        .limit(_BATCH_EVENTS)
    )
    return [
        (UsageEvent.FromString(row.payload), row.amount_nano_usd)
        for row in connection.execute(query)
    ]


def _cross_out(connection: Connection, request_ids: Sequence[str], now_unix_s: int) -> None:
    table = schema.exports
    done = update(table).where(table.c.request_id == bindparam("sent_id"))
    connection.execute(
        done.values(exported_unix_s=now_unix_s), [{"sent_id": it} for it in request_ids]
    )
