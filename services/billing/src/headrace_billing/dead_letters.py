"""Reads what could never be booked."""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from headrace_billing import schema
from headrace_contracts.billing.v1 import billing_pb2 as pb

DEFAULT_LETTERS, MAX_LETTERS = 100, 1000


def list_dead_letters(connection: Connection, limit: int) -> pb.ListDeadLettersResponse:
    """Return the newest dead letters, and how many there are."""
    table = schema.dead_letters
    query = select(table).order_by(table.c.dead_letter_id.desc())
    rows = connection.execute(query.limit(min(limit or DEFAULT_LETTERS, MAX_LETTERS)))
    return pb.ListDeadLettersResponse(
        dead_letters=[
            pb.DeadLetter(
                topic=row.topic,
                partition=row.partition,
                offset=row.log_offset,
                request_id=row.request_id,
                error=row.error,
                payload=row.payload,
                at_unix_s=row.at_unix_s,
            )
            for row in rows
        ],
        total=connection.execute(select(func.count()).select_from(table)).scalar_one(),
    )
