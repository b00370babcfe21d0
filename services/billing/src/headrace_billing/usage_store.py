"""Reads the books: usage per request, and which events are booked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import ColumnElement, Connection, and_, func, select

from headrace_billing import schema
from headrace_billing.ledger import (
    CLOSED,
    CORRECTION,
    corrected_id,
    correction_ids,
    is_correction,
)
from headrace_contracts.billing.v1.billing_pb2 import (
    EventId,
    ListUsageRequest,
    ListUsageResponse,
    UsageRecord,
)
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent

DEFAULT_RECORDS, MAX_RECORDS = 1000, 10_000
_IDS_PER_QUERY = 1000
_events = schema.usage_events


def list_usage(connection: Connection, request: ListUsageRequest) -> ListUsageResponse:
    """Return one page of requests, by request id, and the sum over all pages."""
    matching = and_(*_conditions(request))
    limit = min(request.limit or DEFAULT_RECORDS, MAX_RECORDS)
    page = (
        select(_events.c.request_id)
        .where(matching, _events.c.request_id > request.after_request_id)
        .where(_events.c.request_id.not_like(f"%{CORRECTION}"))
        .group_by(_events.c.request_id)
        .order_by(_events.c.request_id)
        .limit(limit)
    )
    request_ids = list(connection.execute(page).scalars())
    total = connection.execute(select(func.sum(_events.c.amount_nano_usd)).where(matching)).scalar()
    return ListUsageResponse(
        records=_records(connection, request_ids), total_nano_usd=int(total or 0)
    )


def find_missing(connection: Connection, events: Sequence[EventId]) -> list[EventId]:
    """Return those that are neither booked nor kept among the dead letters."""
    known: set[tuple[str, int]] = set()
    wanted = sorted(
        {it.request_id for it in events if it.request_id and "\x00" not in it.request_id}
    )
    for ids in _chunks(wanted):
        for table in (_events, schema.dead_letters):
            query = select(table.c.request_id, table.c.kind).where(table.c.request_id.in_(ids))
            known.update(connection.execute(query))
    return [it for it in events if (it.request_id, it.kind) not in known]


def _records(connection: Connection, request_ids: Sequence[str]) -> list[UsageRecord]:
    found: dict[str, UsageRecord] = {}
    for ids in _chunks(request_ids):
        wanted = [*ids, *(corrected for it in ids for corrected in correction_ids(it))]
        query = select(_events).where(_events.c.request_id.in_(wanted))
        # A request's CLOSED replaces its OPENED, and a correction both; what is taken back comes
        # before what is owed instead.
        for row in connection.execute(query.order_by(_events.c.kind, _events.c.request_id)):
            event = UsageEvent.FromString(row.payload)
            amount_nano_usd = row.amount_nano_usd
            if is_correction(row.request_id):
                event.request_id = corrected_id(row.request_id)
                event.ClearField("replaces")
                event.ClearField("moved_requests")
                amount_nano_usd += found[event.request_id].amount_nano_usd
            found[event.request_id] = UsageRecord(
                event=event, amount_nano_usd=amount_nano_usd, closed=row.kind == CLOSED
            )
    return [found[request_id] for request_id in request_ids]


def _conditions(request: ListUsageRequest) -> list[ColumnElement[bool]]:
    wanted = (
        (_events.c.key_id, request.key_id),
        (_events.c.tenant_id, request.tenant_id),
    )
    conditions = [column == value for column, value in wanted if value]
    if request.request_id:
        ids = (request.request_id, *correction_ids(request.request_id))
        conditions.append(_events.c.request_id.in_(ids))
    return conditions


def _chunks(request_ids: Sequence[str]) -> Iterable[Sequence[str]]:
    return (
        request_ids[start : start + _IDS_PER_QUERY]
        for start in range(0, len(request_ids), _IDS_PER_QUERY)
    )
