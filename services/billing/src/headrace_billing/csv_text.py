"""Usage and invoices as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from google.protobuf.message import Message

from headrace_common.proto_json import to_json
from headrace_contracts.billing.v1 import billing_pb2 as pb

# A spreadsheet would take a cell that begins so for a formula.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def usage_csv(answer: pb.SumUsageResponse) -> str:
    """Render sums of usage, one row each."""
    return _csv([field.name for field in pb.UsageSum.DESCRIPTOR.fields], answer.sums)


def invoice_csv(invoice: pb.Invoice) -> str:
    """Render an invoice's lines, one row each."""
    return _csv([field.name for field in pb.InvoiceLine.DESCRIPTOR.fields], invoice.lines)


def _csv(names: list[str], messages: Iterable[Message]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(names)
    for message in messages:
        values = to_json(message)
        writer.writerow([_cell(values[name]) for name in names])
    return out.getvalue()


def _cell(value: str | int) -> str | int:
    if isinstance(value, str) and value.startswith(_FORMULA_STARTS):
        return "'" + value
    return value
