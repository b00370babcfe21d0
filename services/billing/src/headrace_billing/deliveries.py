"""What surrounds a booking: messages, witnesses, dead letters and the places in the log.

Everything here is called inside the transaction of a batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message
from sqlalchemy import Connection, delete, func, or_, select

from headrace_billing import schema
from headrace_billing.key_rules import MAX_INT64, is_clean_text
from headrace_billing.ledger import CLOSED, best_witness, fullness
from headrace_common.database import insert_new, put
from headrace_common.ids import first_request_id, jobs_prefix, request_of
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import ENDING_SWEPT, UsageEvent, WorkerUsage

M = TypeVar("M", bound=Message)
# Request id and kind: what makes an event one.
EventKey = tuple[str, int]

_MAX_ERROR_CHARS = 500


class Delivery(NamedTuple):
    """One message as the log gave it."""

    topic: str
    partition: int
    offset: int
    value: bytes
    # Wall time at the broker; part of the message's fingerprint.
    timestamp_ms: int = 0

    @property
    def fingerprint(self) -> bytes:
        """What tells this message from another one at the same place of a new log."""
        return hashlib.sha256(b"%d/" % self.timestamp_ms + self.value).digest()


def parse(kind: type[M], value: bytes) -> M | None:
    """Read a message; None if the bytes are none."""
    try:
        return kind.FromString(value)
    except DecodeError:
        return None


def is_usable(witness: WorkerUsage) -> bool:
    """Tell whether a worker's count names a request that can be stored."""
    return (
        bool(witness.request_id)
        and is_clean_text(witness.request_id, 128)
        and is_clean_text(witness.replica.worker_id, 128)
        and witness.replica.incarnation <= MAX_INT64
    )


def keep_witnesses(connection: Connection, witnesses: Sequence[WorkerUsage]) -> int:
    """Store workers' counts, of one worker's for one request the fullest; return how many are new.

    A worker that gets a request again, after it was lost in between, counts it again.
    """
    fullest: dict[tuple[str, str, int], WorkerUsage] = {}
    for it in witnesses:
        key = (it.request_id, it.replica.worker_id, it.replica.incarnation)
        fullest[key] = max(fullest.get(key, it), it, key=fullness)
    table = schema.worker_usage
    new = insert_new(connection, table, [_witness_row(it) for it in fullest.values()])
    for row in new:
        del fullest[row.request_id, row.worker_id, row.incarnation]
    if fullest:
        query = select(table).where(table.c.request_id.in_({it[0] for it in fullest}))
        for row in connection.execute(query).all():
            known = WorkerUsage.FromString(row.payload)
            told = fullest.get((row.request_id, row.worker_id, row.incarnation), known)
            if fullness(told) > fullness(known):
                put(connection, table, [_witness_row(told)])
    return len(new)


def _witness_row(it: WorkerUsage) -> dict[str, Any]:  # Any: column values
    return {
        "request_id": it.request_id,
        "worker_id": it.replica.worker_id,
        "incarnation": it.replica.incarnation,
        "payload": it.SerializeToString(),
    }


def witnesses_of(
    connection: Connection, events: Sequence[UsageEvent]
) -> dict[str, TokenUsage | None]:
    """Return the workers' counts of those requests that nobody closed properly."""
    swept_ids = {it.request_id for it in events if it.ending == ENDING_SWEPT}
    # An id that no text column takes has no witness.
    wanted = [it for it in swept_ids if is_clean_text(it, 128)]
    if not wanted:
        return {}
    table, found = schema.worker_usage, dict[str, list[WorkerUsage]]()
    told = table.c.request_id
    # Ids of jobs by their beginnings, which mostly are of one length: a gateway that died leaves
    # thousands, and a condition for each would be more than SQLite takes.
    beginnings: dict[int, list[str]] = {}
    for it in map(jobs_prefix, wanted):
        beginnings.setdefault(len(it), []).append(it)
    of_jobs = [func.substr(told, 1, size).in_(those) for size, those in beginnings.items()]
    query = select(told, table.c.payload).where(or_(told.in_(wanted), *of_jobs))
    for row in connection.execute(query):
        usage = WorkerUsage.FromString(row.payload)
        found.setdefault(request_of(row.request_id), []).append(usage)
    return {request_id: best_witness(usages) for request_id, usages in found.items()}


def forget_witnesses(connection: Connection, before_unix_us: int, limit: int) -> int:
    """Delete up to *limit* counts of requests that came in before then; return how many."""
    told = schema.worker_usage.c.request_id
    lowest, bound = first_request_id(0), first_request_id(before_unix_us)
    oldest = select(told).where(told >= lowest, told < bound).order_by(told).limit(limit)
    return connection.execute(delete(schema.worker_usage).where(told.in_(oldest))).rowcount


def bury(
    connection: Connection, bad: Sequence[tuple[Delivery, EventKey, str]], now_unix_s: int
) -> int:
    """Keep what cannot be booked, each text once; return how many are new."""
    rows: dict[bytes, dict[str, Any]] = {}  # Any: column values
    for delivery, (request_id, kind), error in bad:
        digest = hashlib.sha256(delivery.value).digest()
        is_known = is_clean_text(request_id, 128) and 0 <= kind <= CLOSED
        rows[digest] = {
            "payload_sha256": digest,
            "topic": delivery.topic,
            "partition": delivery.partition,
            "log_offset": delivery.offset,
            "request_id": request_id if is_known else "",
            "kind": int(kind) if is_known else 0,
            # What is quoted in it came from outside.
            "error": error.replace("\x00", "")[:_MAX_ERROR_CHARS],
            "payload": delivery.value,
            "at_unix_s": now_unix_s,
        }
    return len(insert_new(connection, schema.dead_letters, list(rows.values())))


def move_positions(connection: Connection, deliveries: Sequence[Delivery]) -> None:
    """Let the reading go on behind these messages."""
    last = {(it.topic, it.partition): it for it in deliveries}
    put(
        connection,
        schema.log_positions,
        [
            {
                "topic": it.topic,
                "partition": it.partition,
                "next_offset": it.offset + 1,
                "last_sha256": it.fingerprint,
            }
            for it in last.values()
        ],
    )
