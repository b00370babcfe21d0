"""Who changed what, and when: one row for each change an administrator makes."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, insert, select

from headrace_billing import schema
from headrace_contracts.billing.v1 import billing_pb2 as pb

# Calls from inside the fleet: the command line, the launcher.
OPERATOR = "operator"
DEFAULT_RECORDS, MAX_RECORDS = 1000, 10_000


@dataclass(frozen=True)
class Stamp:
    """When a change is made and by whom: `OPERATOR`, or the id of the admin's key."""

    unix_s: int
    actor: str = OPERATOR


def write_audit(connection: Connection, by: Stamp, action: str, subject: str, detail: str) -> None:
    """Write down a change, in the transaction that makes it."""
    connection.execute(
        insert(schema.audit),
        {
            "at_unix_s": by.unix_s,
            "action": action,
            "subject": subject,
            "detail": detail,
            "actor": by.actor,
        },
    )


def list_audit(connection: Connection, request: pb.ListAuditRequest) -> pb.ListAuditResponse:
    """Return one page of the audit, oldest first."""
    table = schema.audit
    query = select(table).where(table.c.audit_id > request.after_audit_id).order_by("audit_id")
    if request.subject:
        query = query.where(table.c.subject == request.subject)
    query = query.limit(min(request.limit or DEFAULT_RECORDS, MAX_RECORDS))
    rows = connection.execute(query).mappings()
    return pb.ListAuditResponse(records=[pb.AuditRecord(**row) for row in rows])
