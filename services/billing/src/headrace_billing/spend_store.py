"""What a budget's scope has spent and holds, read from the books.

Admission counts budgets in its own store and asks here when that store comes back empty. A request
belongs to the window in which it came in, which its id says (`headrace_common.ids`), so that the
indexes on ids serve windows too.
"""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import ColumnElement, Connection, Table, func, select

from headrace_billing import schema
from headrace_billing.key_rules import check_storable, is_clean_text
from headrace_billing.ledger import CLOSED
from headrace_billing.usage_sums import spent_where
from headrace_common.errors import InvalidRequest
from headrace_common.ids import first_request_id
from headrace_contracts.billing.v1.billing_pb2 import GetSpendRequest, OpenHold, Spend, SpendQuery
from headrace_contracts.ratelimit.v1 import ratelimit_pb2
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent

MAX_QUERIES = 64
MAX_HOLDS = 10_000
_MAX_ID_CHARS = 256
_LEVELS = (
    ratelimit_pb2.LEVEL_KEY,
    ratelimit_pb2.LEVEL_PROJECT,
    ratelimit_pb2.LEVEL_TENANT,
    ratelimit_pb2.LEVEL_MODEL,
)


def check(request: GetSpendRequest) -> None:
    """Check a question.

    Raises:
        InvalidRequest: it cannot be answered.
    """
    check_storable(request)
    if len(request.queries) > MAX_QUERIES:
        raise InvalidRequest(f"At most {MAX_QUERIES} queries may be asked.", param="queries")
    if not request.tenant_id or not is_clean_text(request.tenant_id, _MAX_ID_CHARS):
        raise InvalidRequest("tenant_id is empty or not a clean text.", param="tenant_id")
    for query in request.queries:
        if query.level not in _LEVELS:
            raise InvalidRequest("A query names its level.", param="queries.level")
        if not is_clean_text(query.scope_id, _MAX_ID_CHARS):
            raise InvalidRequest("scope_id is not a clean text.", param="queries.scope_id")


def get_spends(connection: Connection, request: GetSpendRequest) -> list[Spend]:
    """Answer each query."""
    return [_get_spend(connection, request.tenant_id, query) for query in request.queries]


def _get_spend(connection: Connection, tenant_id: str, query: SpendQuery) -> Spend:
    if not (query.from_unix_us or query.to_unix_us):
        # A total goes back to the first request: the sums by day are as right and much shorter.
        spent = spent_where(connection, *_in_scope(schema.daily_usage, tenant_id, query))
    else:
        spent = _spent_in_window(connection, tenant_id, query)
    held = schema.open_requests
    holds = (
        select(held.c.request_id, held.c.hold_nano_usd)
        .where(*_in_scope(held, tenant_id, query), *_in_window(held, query))
        .order_by(held.c.request_id.desc())
        .limit(MAX_HOLDS)
    )
    return Spend(
        spent_nano_usd=spent,
        holds=[OpenHold(**row) for row in connection.execute(holds).mappings()],
    )


def _in_scope(table: Table, tenant_id: str, query: SpendQuery) -> Iterator[ColumnElement[bool]]:
    yield table.c.tenant_id == tenant_id
    if query.level == ratelimit_pb2.LEVEL_KEY:
        yield table.c.key_id == query.scope_id
    elif query.level == ratelimit_pb2.LEVEL_PROJECT:
        yield table.c.project_id == query.scope_id
    elif query.level == ratelimit_pb2.LEVEL_MODEL:
        yield table.c.model == _model_of(tenant_id, query)


def _in_window(table: Table, query: SpendQuery) -> Iterator[ColumnElement[bool]]:
    if query.from_unix_us:
        yield table.c.request_id >= first_request_id(query.from_unix_us)
    if query.to_unix_us:
        yield table.c.request_id < first_request_id(query.to_unix_us)


def _model_of(tenant_id: str, query: SpendQuery) -> str:
    return query.scope_id.removeprefix(f"{tenant_id}/")


def _spent_in_window(connection: Connection, tenant_id: str, query: SpendQuery) -> int:
    events = schema.usage_events
    conditions = [
        events.c.tenant_id == tenant_id,
        events.c.kind == CLOSED,
        *_in_window(events, query),
    ]
    if query.level in (ratelimit_pb2.LEVEL_PROJECT, ratelimit_pb2.LEVEL_MODEL):
        # What no column says stands in the event.
        name, wanted = "project_id", query.scope_id
        if query.level == ratelimit_pb2.LEVEL_MODEL:
            name, wanted = "model", _model_of(tenant_id, query)
        rows = connection.execute(
            select(events.c.amount_nano_usd, events.c.payload).where(*conditions)
        )
        return sum(
            row.amount_nano_usd
            for row in rows
            if getattr(UsageEvent.FromString(row.payload), name) == wanted
        )
    if query.level == ratelimit_pb2.LEVEL_KEY:
        conditions.append(events.c.key_id == query.scope_id)
    total = select(func.sum(events.c.amount_nano_usd)).where(*conditions)
    return int(connection.execute(total).scalar() or 0)
