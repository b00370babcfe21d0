"""Credits and balances in SQL."""

from __future__ import annotations

from sqlalchemy import Connection, delete, func, insert, select

from headrace_billing import schema
from headrace_billing.audit import Stamp, write_audit
from headrace_billing.credits import (
    check_grant,
    expiry_of,
    postings_of,
    unused,
)
from headrace_billing.ledger import account_of
from headrace_billing.revisions import touch_keys
from headrace_billing.tenant_store import find_tenant, is_prepaid
from headrace_billing.usage_sums import open_of, spent_of
from headrace_common.database import add_or_insert
from headrace_common.errors import InvalidRequest
from headrace_contracts.billing.v1 import billing_pb2 as pb

_journal = schema.journal
MAX_EXPIRED_AT_ONCE = 200


def grant_credit(connection: Connection, request: pb.GrantCreditRequest, by: Stamp) -> pb.Credit:
    """Put money onto a tenant's account, once per credit id.

    Raises:
        InvalidRequest: a field breaks its rule, or the id names another credit.
        NotFound: no such tenant.
    """
    check_grant(request, by.unix_s)
    find_tenant(connection, request.tenant_id)
    wanted = pb.Credit(
        tenant_id=request.tenant_id,
        credit_id=request.credit_id,
        amount_nano_usd=request.amount_nano_usd,
        kind=request.kind or pb.Credit.KIND_PAYMENT,
        note=request.note,
        created_unix_s=by.unix_s,
        expires_unix_s=request.expires_unix_s,
    )
    return book_credit(connection, wanted, by)


def book_credit(connection: Connection, wanted: pb.Credit, by: Stamp) -> pb.Credit:
    """Book a credit unless its id is booked; tell the tenant's keys of their new balance.

    Raises:
        InvalidRequest: the id names a credit of another amount or kind.
    """
    # Takes the lock that makes administrators' writes take turns.
    touch_keys(connection, [wanted.tenant_id])
    journal_id = f"credit:{wanted.tenant_id}:{wanted.credit_id}"
    query = select(_journal.c.payload).where(_journal.c.journal_id == journal_id)
    payload = connection.execute(query).scalar_one_or_none()
    if payload is not None:
        before = pb.Credit.FromString(payload)
        if _terms(before) != _terms(wanted):
            raise InvalidRequest("This credit_id names another credit.", param="credit_id")
        return before
    connection.execute(
        insert(_journal),
        {
            "journal_id": journal_id,
            "tenant_id": wanted.tenant_id,
            "payload": wanted.SerializeToString(),
            "created_unix_s": by.unix_s,
        },
    )
    if wanted.expires_unix_s:
        row = {"journal_id": journal_id, "expires_unix_s": wanted.expires_unix_s}
        connection.execute(insert(schema.ending_credits), row)
    rows = [
        {"account": it.account, "amount_nano_usd": it.amount_nano_usd}
        for it in sorted(postings_of(wanted), key=lambda it: it.account)
    ]
    connection.execute(
        insert(schema.journal_postings), [{"journal_id": journal_id, **row} for row in rows]
    )
    add_or_insert(connection, schema.balances, rows)
    detail = f"{wanted.credit_id}: {wanted.amount_nano_usd} nano-USD, {wanted.note}"
    write_audit(connection, by, "book_credit", wanted.tenant_id, detail)
    return wanted


def _terms(credit: pb.Credit) -> tuple[int, int, int]:
    return (credit.amount_nano_usd, credit.kind, credit.expires_unix_s)


def expire_credits(connection: Connection, by: Stamp) -> int:
    """Take back what is left of credits that have ended, each once; return how many those were."""
    table = schema.ending_credits
    due = (
        select(table.c.journal_id, _journal.c.payload)
        .join(_journal, _journal.c.journal_id == table.c.journal_id)
        .where(table.c.expires_unix_s <= by.unix_s)
        .order_by(table.c.expires_unix_s, table.c.journal_id)
        .limit(MAX_EXPIRED_AT_ONCE)
    )
    rows = connection.execute(due).all()
    for row in rows:
        ending = pb.Credit.FromString(row.payload)
        tenant_id = ending.tenant_id
        used = spent_of(connection, tenant_id) + open_of(connection, tenant_id)
        left = unused(list_credits(connection, tenant_id), ending, used)
        if left:
            book_credit(connection, expiry_of(ending, left, by.unix_s), by)
        connection.execute(delete(table).where(table.c.journal_id == row.journal_id))
    return len(rows)


def list_credits(connection: Connection, tenant_id: str) -> list[pb.Credit]:
    """A tenant's credits, oldest first."""
    query = select(_journal.c.payload).where(_journal.c.tenant_id == tenant_id)
    query = query.order_by(_journal.c.created_unix_s, _journal.c.journal_id)
    return [pb.Credit.FromString(it) for it in connection.execute(query).scalars()]


def credits_of(connection: Connection, tenant_id: str) -> int:
    """Return the sum of a tenant's credits, corrections included."""
    postings = schema.journal_postings
    query = select(func.sum(postings.c.amount_nano_usd)).where(
        postings.c.account == account_of(tenant_id)
    )
    return -int(connection.execute(query).scalar() or 0)


def balance(connection: Connection, tenant_id: str) -> pb.Balance:
    """Return how a tenant stands.

    Raises:
        NotFound: no such tenant.
    """
    tenant = find_tenant(connection, tenant_id)
    credited, spent = credits_of(connection, tenant_id), spent_of(connection, tenant_id)
    held = open_of(connection, tenant_id)
    return pb.Balance(
        tenant_id=tenant_id,
        credits_nano_usd=credited,
        spent_nano_usd=spent,
        open_nano_usd=held,
        available_nano_usd=credited - spent - held,
        prepaid=is_prepaid(connection, tenant),
    )
