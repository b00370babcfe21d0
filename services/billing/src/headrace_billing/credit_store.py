"""What was put onto tenants' accounts."""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from headrace_billing import schema


def account_of(tenant_id: str) -> str:
    """Return the account on which a tenant owes (above 0) or has money (below 0)."""
    return f"receivable:{tenant_id}"


def credits_of(connection: Connection, tenant_id: str) -> int:
    """Return the sum of a tenant's credits, corrections included."""
    postings = schema.journal_postings
    query = select(func.sum(postings.c.amount_nano_usd)).where(
        postings.c.account == account_of(tenant_id)
    )
    return -int(connection.execute(query).scalar() or 0)
