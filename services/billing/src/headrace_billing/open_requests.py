"""Requests that were opened and are not over: which they are and what they hold. Derived."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import Connection, func, select

from headrace_billing import schema
from headrace_billing.key_rules import MAX_INT64
from headrace_common.bulk_rows import delete_rows, insert_missing_rows
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent

# A request whose gateway gave no deadline is looked after when this much time has passed.
_DEFAULT_LIFE_US = 3600 * 1_000_000


def open_row(opened: UsageEvent) -> Mapping[str, str | int]:
    """Return the row of an OPENED, its columns in the table's order."""
    return {
        "request_id": opened.request_id,
        "deadline_unix_us": opened.deadline_unix_us or opened.occurred_unix_us + _DEFAULT_LIFE_US,
        "tenant_id": opened.tenant_id,
        "project_id": opened.project_id,
        "key_id": opened.key_id,
        "model": opened.model,
        "hold_nano_usd": min(opened.hold_nano_usd, MAX_INT64),
        "opened_unix_us": opened.occurred_unix_us,
    }


def keep_open(connection: Connection, opened: Sequence[UsageEvent]) -> None:
    """Write down requests that began, but for those that are over already."""
    over = _closed_among(connection, [it.request_id for it in opened])
    rows = [tuple(open_row(it).values()) for it in opened if it.request_id not in over]
    insert_missing_rows(connection, schema.open_requests, rows)


def forget_open(connection: Connection, request_ids: Collection[str]) -> None:
    """Cross out requests that are over."""
    # In order, so that two writers cannot wait for one another in a ring.
    delete_rows(connection, schema.open_requests, [(it,) for it in sorted(request_ids)])


def count_open(connection: Connection) -> int:
    """Return how many requests are open."""
    return connection.execute(select(func.count()).select_from(schema.open_requests)).scalar_one()


def _closed_among(connection: Connection, request_ids: Sequence[str]) -> set[str]:
    table = schema.entries
    if not request_ids:
        return set()
    query = select(table.c.request_id).where(table.c.request_id.in_(request_ids))
    return set(connection.execute(query).scalars())
