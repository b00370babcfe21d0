"""Invoices in SQL: issued once, never changed, corrected by credit notes."""

from __future__ import annotations

from sqlalchemy import Connection, insert, select

from headrace_billing import schema
from headrace_billing.audit import Stamp, write_audit
from headrace_billing.credit_store import book_credit
from headrace_billing.invoices import complete, credit_note, lines_of, period_end, unbilled
from headrace_billing.key_rules import MAX_NAME_CHARS, check_slug, check_text
from headrace_billing.revisions import bump_revision
from headrace_billing.tenant_store import find_tenant
from headrace_billing.usage_sums import read_days
from headrace_common.database import add_or_insert
from headrace_common.errors import InvalidRequest, NotFound
from headrace_contracts.billing.v1 import billing_pb2 as pb

_table = schema.invoices


def issue_invoice(connection: Connection, request: pb.IssueInvoiceRequest, by: Stamp) -> pb.Invoice:
    """Bill a tenant for everything until the period's end that no invoice holds yet.

    Raises:
        InvalidRequest: not a period, or one that cannot be billed yet.
        NotFound: no such tenant.
    """
    find_tenant(connection, request.tenant_id)
    # Takes the lock that makes administrators' writes take turns.
    bump_revision(connection)
    if (issued := _at_slot(connection, request.tenant_id, request.period)) is not None:
        return issued
    end_unix_s = period_end(request.period, by.unix_s)
    used = read_days(connection, schema.daily_usage, request.tenant_id, end_unix_s)
    billed = read_days(connection, schema.invoiced_usage, request.tenant_id, end_unix_s)
    rest = unbilled(used, billed)
    invoice = pb.Invoice(
        tenant_id=request.tenant_id,
        period=request.period,
        issued_unix_s=by.unix_s,
        lines=lines_of(rest),
        # What is taken back may lie in this period, and what is owed instead in the next.
        num_requests=max(0, sum(values[0] for values in rest.sums.values())),
    )
    _keep(connection, invoice, request.period, by)
    add_or_insert(connection, schema.invoiced_usage, list(rest.rows()))
    return invoice


def correct_invoice(
    connection: Connection, request: pb.CorrectInvoiceRequest, by: Stamp
) -> pb.Invoice:
    """Give a part of an invoice back, by a credit note and a counter-entry in the books.

    Raises:
        InvalidRequest: a field breaks its rule, or more would be given back than is left.
        NotFound: no such invoice.
    """
    check_slug(request.correction_id, "correction_id")
    check_text(request.reason, MAX_NAME_CHARS, "reason")
    bump_revision(connection)
    invoice = get_invoice(connection, request.invoice_id)
    slot = f"correction:{request.correction_id}"
    if (issued := _at_slot(connection, invoice.tenant_id, slot)) is not None:
        if issued.corrects_invoice_id != request.invoice_id or issued.total_nano_usd != -int(
            request.amount_nano_usd
        ):
            raise InvalidRequest("This correction_id names another one.", param="correction_id")
        return issued
    query = select(_table.c.payload).where(_table.c.corrects_invoice_id == invoice.invoice_id)
    before = [pb.Invoice.FromString(it) for it in connection.execute(query).scalars()]
    note = credit_note(invoice, before, request)
    note.issued_unix_s = by.unix_s
    _keep(connection, note, slot, by)
    counter = pb.Credit(
        tenant_id=invoice.tenant_id,
        # No credit that is granted can have such an id.
        credit_id=slot,
        amount_nano_usd=request.amount_nano_usd,
        kind=pb.Credit.KIND_CORRECTION,
        note=request.reason,
        created_unix_s=by.unix_s,
    )
    book_credit(connection, counter, by)
    return note


def list_invoices(connection: Connection, tenant_id: str) -> list[pb.Invoice]:
    """A tenant's invoices by number, without their lines."""
    invoices = all_invoices(connection, tenant_id)
    for invoice in invoices:
        invoice.ClearField("lines")
    return invoices


def all_invoices(connection: Connection, tenant_id: str) -> list[pb.Invoice]:
    """A tenant's invoices by number."""
    query = select(_table.c.payload).where(_table.c.tenant_id == tenant_id).order_by("number")
    return [pb.Invoice.FromString(it) for it in connection.execute(query).scalars()]


def get_invoice(connection: Connection, invoice_id: str) -> pb.Invoice:
    """Return an invoice.

    Raises:
        NotFound: there is none.
    """
    query = select(_table.c.payload).where(_table.c.invoice_id == invoice_id.replace("\x00", ""))
    payload = connection.execute(query).scalar_one_or_none()
    if payload is None:
        raise NotFound(f"There is no invoice {invoice_id!r}.", param="invoice_id")
    return pb.Invoice.FromString(payload)


def _at_slot(connection: Connection, tenant_id: str, slot: str) -> pb.Invoice | None:
    query = select(_table.c.payload).where(
        _table.c.tenant_id == tenant_id, _table.c.slot == slot.replace("\x00", "")
    )
    payload = connection.execute(query).scalar_one_or_none()
    return None if payload is None else pb.Invoice.FromString(payload)


def _keep(connection: Connection, invoice: pb.Invoice, slot: str, by: Stamp) -> None:
    query = select(_table.c.payload).where(_table.c.tenant_id == invoice.tenant_id)
    last = connection.execute(query.order_by(_table.c.number.desc()).limit(1)).scalar_one_or_none()
    complete(invoice, None if last is None else pb.Invoice.FromString(last))
    connection.execute(
        insert(_table),
        {
            "invoice_id": invoice.invoice_id,
            "tenant_id": invoice.tenant_id,
            "number": invoice.number,
            "slot": slot,
            "corrects_invoice_id": invoice.corrects_invoice_id,
            "payload": invoice.SerializeToString(deterministic=True),
        },
    )
    detail = f"{slot}: {invoice.total_nano_usd} nano-USD, due {invoice.due_cents} cents"
    write_audit(connection, by, "issue_invoice", invoice.invoice_id, detail)
