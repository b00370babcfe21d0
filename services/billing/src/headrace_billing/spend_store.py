"""What a budget's scope has spent and holds, read from the books.

Admission counts budgets in its own store and asks here when that store comes back empty. A request
belongs to the window in which it came in, which its id says (`headrace_common.ids`), so that the
indexes on ids serve windows too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sqlalchemy import ColumnElement, Connection, Row, and_, func, select

from headrace_billing import schema
from headrace_billing.key_rules import check_storable, is_clean_text
from headrace_billing.ledger import CLOSED, OPENED
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
_events = schema.usage_events


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
    where = and_(*_conditions(tenant_id, query))
    belongs = _filter_of(tenant_id, query)
    if belongs is None:
        total = select(func.sum(_events.c.amount_nano_usd)).where(where, _events.c.kind == CLOSED)
        spent = int(connection.execute(total).scalar() or 0)
    else:
        rows = select(_events.c.amount_nano_usd, _events.c.payload).where(
            where, _events.c.kind == CLOSED
        )
        spent = sum(row.amount_nano_usd for row in _matching(connection.execute(rows), belongs))
    holds = (
        select(_events.c.request_id, _events.c.payload)
        .join(schema.open_requests, schema.open_requests.c.request_id == _events.c.request_id)
        .where(where, _events.c.kind == OPENED)
        .order_by(_events.c.request_id.desc())
        .limit(MAX_HOLDS)
    )
    open_rows = _matching(connection.execute(holds), belongs or (lambda _: True))
    return Spend(
        spent_nano_usd=spent,
        holds=[
            OpenHold(
                request_id=row.request_id,
                hold_nano_usd=UsageEvent.FromString(row.payload).hold_nano_usd,
            )
            for row in open_rows
        ],
    )


def _conditions(tenant_id: str, query: SpendQuery) -> Iterator[ColumnElement[bool]]:
    yield _events.c.tenant_id == tenant_id
    if query.level == ratelimit_pb2.LEVEL_KEY:
        yield _events.c.key_id == query.scope_id
    if query.from_unix_us:
        yield _events.c.request_id >= first_request_id(query.from_unix_us)
    if query.to_unix_us:
        yield _events.c.request_id < first_request_id(query.to_unix_us)


def _filter_of(tenant_id: str, query: SpendQuery) -> Callable[[UsageEvent], bool] | None:
    """Return what the columns cannot say: project and model stand in the event only."""
    if query.level == ratelimit_pb2.LEVEL_PROJECT:
        return lambda event: event.project_id == query.scope_id
    if query.level == ratelimit_pb2.LEVEL_MODEL:
        model = query.scope_id.removeprefix(f"{tenant_id}/")
        return lambda event: event.model == model
    return None


def _matching(
    rows: Iterator[Row[tuple[object, ...]]], belongs: Callable[[UsageEvent], bool]
) -> Iterator[Row[tuple[object, ...]]]:
    return (row for row in rows if belongs(UsageEvent.FromString(row.payload)))
