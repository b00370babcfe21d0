"""Recounts the journal and the invoices: what `verify` finds besides the requests."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Connection, select

from headrace_billing import schema
from headrace_billing.credits import postings_of
from headrace_billing.daily import DailySums
from headrace_billing.invoice_store import all_invoices
from headrace_billing.invoices import billed_days, complete, digest
from headrace_billing.usage_sums import read_days
from headrace_contracts.billing.v1 import billing_pb2 as pb


def check_journal(connection: Connection, balances: dict[str, int]) -> Iterator[str]:
    """Add the journal to *balances*; yield what is wrong with its postings."""
    stored: dict[str, dict[str, int]] = {}
    for row in connection.execute(select(schema.journal_postings)):
        stored.setdefault(row.journal_id, {})[row.account] = row.amount_nano_usd
    for row in connection.execute(select(schema.journal)):
        wanted = {
            it.account: it.amount_nano_usd for it in postings_of(pb.Credit.FromString(row.payload))
        }
        for account, amount in wanted.items():
            balances[account] = balances.get(account, 0) + amount
        if stored.pop(row.journal_id, {}) != wanted:
            yield f"Journal {row.journal_id} has other postings than it says."
    yield from (f"Postings of {journal_id} belong to nothing." for journal_id in stored)


def check_invoices(connection: Connection) -> Iterator[str]:
    """Yield what is wrong with the invoices: numbers, sums, digests, and what they bill."""
    billed = DailySums()
    tenants = select(schema.invoices.c.tenant_id).distinct().order_by("tenant_id")
    for tenant_id in connection.execute(tenants).scalars():
        before: pb.Invoice | None = None
        for invoice in all_invoices(connection, tenant_id):
            again = pb.Invoice()
            again.CopyFrom(invoice)
            if complete(again, before) != invoice or digest(invoice, before) != invoice.sha256:
                yield f"Invoice {invoice.invoice_id} was changed, or one before it was."
            billed_days(invoice, billed)
            before = invoice
    stored = read_days(connection, schema.invoiced_usage)
    for key in sorted(stored.sums.keys() | billed.sums.keys()):
        # Invoices' lines do not count requests.
        have, want = stored.sums.get(key, [0]), billed.sums.get(key, [0])
        if have[1:] != want[1:]:
            yield f"Billed usage {key} is {have[1:]}, the invoices say {want[1:]}."
