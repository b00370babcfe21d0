"""Fills derived tables from the events of books that are older than those tables."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Connection, Table, column, insert, select, table

from headrace_billing.daily import DailySums
from headrace_billing.ledger import OPENED, admitted_unix_s, book
from headrace_billing.open_requests import open_row
from headrace_billing.prices import PriceBook
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent

_PIECE_ROWS = 1000


def fill_derived_tables(
    connection: Connection, prices: PriceBook, daily_usage: Table, open_requests: Table
) -> None:
    """Fill daily sums and open requests of a database that has only events so far."""
    days, still_open = DailySums(), dict[str, UsageEvent]()
    for event in _events(connection):
        if event.kind == OPENED:
            still_open[event.request_id] = event
            continue
        # By request id and kind, so the OPENED came before.
        still_open.pop(event.request_id, None)
        days.add(event, admitted_unix_s(event), book(event, prices).amounts)
    for target, rows in (
        (daily_usage, list(days.rows())),
        (open_requests, [open_row(it) for it in still_open.values()]),
    ):
        if rows:
            connection.execute(insert(target), rows)


def _events(connection: Connection) -> Iterator[UsageEvent]:
    """All events, in order of request and kind."""
    names = ("request_id", "kind", "payload")
    events = table("usage_events", *(column(name) for name in names))
    low: tuple[str, int] = ("", 0)
    while True:
        query = (
            select(events)
            .where(
                (events.c.request_id > low[0])
                | ((events.c.request_id == low[0]) & (events.c.kind > low[1]))
            )
            .order_by(events.c.request_id, events.c.kind)
            .limit(_PIECE_ROWS)
        )
        rows = connection.execute(query).all()
        if not rows:
            return
        yield from (UsageEvent.FromString(row.payload) for row in rows)
        low = (rows[-1].request_id, rows[-1].kind)
