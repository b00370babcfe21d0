"""Reads usage summed by day, and what a tenant has spent and holds in all."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, Table, func, select

from headrace_billing import schema
from headrace_billing.daily import CLASSES, KEY_NAMES, SUM_NAMES, DailySums, day_of
from headrace_common.errors import InvalidRequest
from headrace_contracts.billing.v1 import billing_pb2 as pb
from headrace_contracts.usage.v1.usage_pb2 import PriceTier

DEFAULT_SUMS, MAX_SUMS = 1000, 10_000
_days, _open = schema.daily_usage, schema.open_requests
# What callers group by -> the column.
_GROUPS = {
    "day": "day_unix_s",
    "project": "project_id",
    "key": "key_id",
    "model": "model",
    "tier": "tier",
}


def sum_usage(connection: Connection, request: pb.SumUsageRequest) -> pb.SumUsageResponse:
    """Sum usage by what is asked for.

    Raises:
        InvalidRequest: no tenant, grouped by something unknown, or no time between the bounds.
    """
    if not request.tenant_id:
        raise InvalidRequest("Name a tenant_id.", param="tenant_id")
    if unknown := sorted(set(request.group_by) - set(_GROUPS)):
        raise InvalidRequest(
            f"group_by knows {', '.join(_GROUPS)}, not {', '.join(unknown)}.", param="group_by"
        )
    if 0 < request.to_unix_s <= request.from_unix_s:
        raise InvalidRequest("from_unix_s must lie before to_unix_s.", param="from_unix_s")
    groups = [_days.c[column] for name, column in _GROUPS.items() if name in request.group_by]
    limit = min(request.limit or DEFAULT_SUMS, MAX_SUMS)
    query = (
        select(*groups, *(func.sum(_days.c[name]).label(name) for name in SUM_NAMES))
        .where(*_conditions(request))
        .group_by(*groups)
        .having(func.count() > 0)
        .order_by(*groups)
        .limit(limit + 1)
        .offset(request.offset)
    )
    rows = connection.execute(query).mappings().all()
    sums = [_usage_sum({name: value or 0 for name, value in row.items()}) for row in rows[:limit]]
    return pb.SumUsageResponse(sums=sums, has_more=len(rows) > limit)


def stored_days(connection: Connection) -> DailySums:
    """Return all daily sums."""
    return read_days(connection, _days)


def read_days(
    connection: Connection, table: Table, tenant_id: str = "", end_unix_s: int = 0
) -> DailySums:
    """Return the sums of a table: of all, or of one tenant's days before *end_unix_s*."""
    days, num_names = DailySums(), len(KEY_NAMES)
    query = select(*(table.c[name] for name in (*KEY_NAMES, *SUM_NAMES)))
    if tenant_id:
        query = query.where(table.c.tenant_id == tenant_id, table.c.day_unix_s < end_unix_s)
    for row in connection.execute(query):
        days.sums[tuple(row[:num_names])] = [int(it) for it in row[num_names:]]
    return days


def spent_of(connection: Connection, tenant_id: str) -> int:
    """Return all that a tenant ever spent."""
    return spent_where(connection, _days.c.tenant_id == tenant_id)


def spent_where(connection: Connection, *conditions: ColumnElement[bool]) -> int:
    """Return all that was ever spent under conditions on `daily_usage`."""
    query = select(func.sum(_amount())).where(*conditions)
    return int(connection.execute(query).scalar() or 0)


def open_of(connection: Connection, tenant_id: str) -> int:
    """Return all that a tenant's running requests hold."""
    query = select(func.sum(_open.c.hold_nano_usd)).where(_open.c.tenant_id == tenant_id)
    return int(connection.execute(query).scalar() or 0)


def _amount() -> ColumnElement[int]:
    first, *rest = (_days.c[f"{name}_nano_usd"] for name in CLASSES)
    total: ColumnElement[int] = first
    for column in rest:
        total = total + column
    return total


def _conditions(request: pb.SumUsageRequest) -> list[ColumnElement[bool]]:
    names = ("tenant_id", "key_id", "project_id", "model")
    conditions = [
        _days.c[name] == getattr(request, name) for name in names if getattr(request, name)
    ]
    if request.from_unix_s:
        conditions.append(_days.c.day_unix_s >= day_of(request.from_unix_s))
    if request.to_unix_s:
        conditions.append(_days.c.day_unix_s < request.to_unix_s)
    return conditions


def _usage_sum(row: dict[str, str | int]) -> pb.UsageSum:
    values = {name: value for name, value in row.items() if name in _USAGE_FIELDS}
    cached, written = int(row["cached_input_tokens"]), int(row["cache_write_tokens"])
    values["cached_tokens"] = cached
    values["prompt_tokens"] = int(row["input_tokens"]) + cached + written
    values["tier"] = PriceTier.ValueType(int(row.get("tier", 0)))
    # SUM is a NUMERIC in PostgreSQL.
    return pb.UsageSum(
        **{name: value if isinstance(value, str) else int(value) for name, value in values.items()}  # type: ignore[arg-type]  # by name
    )


_USAGE_FIELDS = {field.name for field in pb.UsageSum.DESCRIPTOR.fields}
