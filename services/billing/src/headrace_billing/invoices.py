"""What stands on an invoice: pure.

An invoice bills whatever no invoice holds yet, up to its period's end: a late booking of a month
that is billed already is on the next one, so that all invoices together are exactly the ledger;
what a correction takes back is there with its sign.
Lines are exact nano-USD; only the sum is rounded, half to even, to whole cents, and what rounding
leaves over is carried to the next invoice. Each invoice's digest covers that of the one before.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

from headrace_billing.daily import CLASSES, SUM_NAMES, DailySums
from headrace_common.errors import InvalidRequest
from headrace_contracts.billing.v1 import billing_pb2 as pb
from headrace_contracts.usage.v1.usage_pb2 import PriceTier

NANO_USD_PER_CENT = 10_000_000
_PERIOD = re.compile(r"(\d{4})-(\d{2})(?:-(\d{2}))?\Z")


def period_end(period: str, now_unix_s: int) -> int:
    """Return the first second after a period.

    Raises:
        InvalidRequest: not a period, or one that is not over (a month) or not begun (a day).
    """
    match = _PERIOD.match(period)
    try:
        if match is None:
            raise ValueError
        year, month, day = int(match[1]), int(match[2]), int(match[3] or 1)
        start = datetime(year, month, day, tzinfo=UTC)
        next_month = datetime(year + month // 12, month % 12 + 1, 1, tzinfo=UTC)
    except ValueError as error:
        raise InvalidRequest(
            "period must be a month such as 2026-10 or a day such as 2026-10-17.", param="period"
        ) from error
    if match[3]:
        if start.timestamp() > now_unix_s:
            raise InvalidRequest(f"{period} has not begun.", param="period")
        return int((start + timedelta(days=1)).timestamp())
    end = int(next_month.timestamp())
    if end > now_unix_s:
        raise InvalidRequest(
            f"{period} is not over; name a day to bill until then.", param="period"
        )
    return end


def unbilled(used: DailySums, billed: DailySums) -> DailySums:
    """Return what was used and is on no invoice; keys without any difference are left out."""
    rest = DailySums()
    for key, values in used.sums.items():
        before = billed.sums.get(key, [0] * len(values))
        left = [a - b for a, b in zip(values, before, strict=True)]
        if any(left):
            rest.sums[key] = left
    return rest


def lines_of(days: DailySums) -> list[pb.InvoiceLine]:
    """Return a line for each day, project, key, model, tier and class of tokens used."""
    return [line for row in days.rows() for line in _lines(row)]


def _lines(row: Mapping[str, str | int]) -> list[pb.InvoiceLine]:
    lines = []
    for name in CLASSES:
        tokens, amount = int(row[f"{name}_tokens"]), int(row[f"{name}_nano_usd"])
        if tokens or amount:
            day = datetime.fromtimestamp(int(row["day_unix_s"]), UTC).date().isoformat()
            lines.append(
                pb.InvoiceLine(
                    description=f"{row['model']}, {name.replace('_', ' ')} tokens, {day}",
                    day_unix_s=int(row["day_unix_s"]),
                    project_id=str(row["project_id"]),
                    key_id=str(row["key_id"]),
                    model=str(row["model"]),
                    tier=PriceTier.ValueType(int(row["tier"])),
                    token_class=name,
                    tokens=abs(tokens),
                    amount_nano_usd=amount,
                    is_returned=tokens < 0,
                )
            )
    return lines


def rounded_cents(nano_usd: int) -> int:
    """Round to whole cents, half to even."""
    cents, rest = divmod(nano_usd, NANO_USD_PER_CENT)
    if 2 * rest > NANO_USD_PER_CENT or (2 * rest == NANO_USD_PER_CENT and cents % 2):
        cents += 1
    return cents


def complete(invoice: pb.Invoice, before: pb.Invoice | None) -> pb.Invoice:
    """Add number, sums, rounding and digest to an invoice with its lines.

    Args:
        invoice: is completed and returned.
        before: the tenant's last one, of whatever kind.
    """
    invoice.number = (before.number if before else 0) + 1
    invoice.invoice_id = f"{invoice.tenant_id}-{invoice.number:06d}"
    invoice.total_nano_usd = sum(line.amount_nano_usd for line in invoice.lines)
    invoice.carried_in_nano_usd = before.carried_out_nano_usd if before else 0
    exact = invoice.total_nano_usd + invoice.carried_in_nano_usd
    invoice.due_cents = rounded_cents(exact)
    invoice.carried_out_nano_usd = exact - invoice.due_cents * NANO_USD_PER_CENT
    invoice.sha256 = digest(invoice, before)
    return invoice


def digest(invoice: pb.Invoice, before: pb.Invoice | None) -> bytes:
    """Return the digest of an invoice and, through the one before, of all before it."""
    bare = pb.Invoice()
    bare.CopyFrom(invoice)
    bare.ClearField("sha256")
    content = bare.SerializeToString(deterministic=True)
    return hashlib.sha256((before.sha256 if before else b"") + content).digest()


def billed_days(invoice: pb.Invoice, days: DailySums) -> None:
    """Add what an invoice's lines bill to *days*; requests are not on lines."""
    for line in invoice.lines:
        if line.token_class not in CLASSES:
            continue
        key = (
            invoice.tenant_id,
            line.day_unix_s,
            line.project_id,
            line.key_id,
            line.model,
            int(line.tier),
        )
        values = days.sums.setdefault(key, [0] * len(SUM_NAMES))
        tokens = -line.tokens if line.is_returned else line.tokens
        values[SUM_NAMES.index(f"{line.token_class}_tokens")] += tokens
        values[SUM_NAMES.index(f"{line.token_class}_nano_usd")] += line.amount_nano_usd


def credit_note(
    invoice: pb.Invoice, corrections: Sequence[pb.Invoice], request: pb.CorrectInvoiceRequest
) -> pb.Invoice:
    """Return the counter-entry to a part of an invoice, not completed.

    Raises:
        InvalidRequest: it would give back more than the invoice and its corrections leave.
    """
    if invoice.corrects_invoice_id:
        raise InvalidRequest("A credit note cannot be corrected.", param="invoice_id")
    left = invoice.total_nano_usd + sum(it.total_nano_usd for it in corrections)
    if not 0 < request.amount_nano_usd <= left:
        raise InvalidRequest(
            f"amount_nano_usd must be 1 to {left}: so much is left of the invoice.",
            param="amount_nano_usd",
        )
    line = pb.InvoiceLine(
        description=request.reason or "correction",
        token_class="correction",  # noqa: S106 - a class of invoice lines
        amount_nano_usd=-request.amount_nano_usd,
    )
    return pb.Invoice(
        tenant_id=invoice.tenant_id,
        period=invoice.period,
        corrects_invoice_id=invoice.invoice_id,
        lines=[line],
    )
