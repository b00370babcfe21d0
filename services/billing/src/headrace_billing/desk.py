"""Where every change by an administrator passes: one transaction, an audit, an announcement.

A write that names an idempotency key is done once: its answer is kept beside it, without secrets,
and given again to the same request; the same key for another request is refused. Old answers are
deleted by those that come, some by each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import Message
from sqlalchemy import Connection, delete, select, update

from headrace_billing import schema
from headrace_billing.audit import OPERATOR, Stamp
from headrace_billing.changes import ChangeFeed
from headrace_billing.daily import SECONDS_PER_DAY
from headrace_billing.key_rules import check_storable
from headrace_billing.store import Database
from headrace_common.clock import Clock
from headrace_common.database import insert_new
from headrace_common.errors import InvalidRequest
from headrace_common.rpc import Call
from headrace_contracts.billing.v1.billing_pb2 import CreateKeyResponse

R = TypeVar("R", bound=Message)
T = TypeVar("T")
_MAX_FORGOTTEN_AT_ONCE = 100
MAX_IDEMPOTENCY_KEY_CHARS = 255


class AdminCall(Call):
    """A call of a known administrator."""

    __slots__ = ("actor", "idempotency_key")

    def __init__(self, actor: str, idempotency_key: str = "") -> None:
        super().__init__(None)
        self.actor, self.idempotency_key = actor, idempotency_key


class Desk:
    """Runs reads and changes for the servicers.

    Args:
        database: where things are.
        feed: told after each change.
        clock: time.
        kept_days: how long a write that names an idempotency key is known.
    """

    def __init__(self, database: Database, feed: ChangeFeed, clock: Clock, kept_days: int) -> None:
        self._kept_s = kept_days * SECONDS_PER_DAY
        self._database = database
        self._feed = feed
        self._clock = clock

    def now_unix_s(self) -> int:
        """Return the time."""
        return int(self._clock.unix_s())

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Read on one unchanging view."""
        return await self._database.read(work)

    async def change(
        self, call: Call, request: Message, kind: type[R], work: Callable[[Connection, Stamp], R]
    ) -> R:
        """Make a change and tell the watchers.

        Args:
            call: who asks, and under which idempotency key.
            request: what is asked.
            kind: the answer's type.
            work: does it, inside the transaction.

        Raises:
            InvalidRequest: a number that no column holds, or whatever *work* refuses.
        """
        check_storable(request)
        actor = call.actor if isinstance(call, AdminCall) else OPERATOR
        by = Stamp(self.now_unix_s(), actor)
        key = call.idempotency_key if isinstance(call, AdminCall) else ""
        if len(key) > MAX_IDEMPOTENCY_KEY_CHARS:
            raise InvalidRequest("The idempotency key is too long.", param="idempotency-key")

        def once(connection: Connection) -> R:
            if not key:
                return work(connection, by)
            _forget_writes(connection, by.unix_s - self._kept_s)
            return _once(connection, by, key, request, kind, lambda: work(connection, by))

        answer = await self._database.write(once)
        self._feed.nudge()
        return answer


def _forget_writes(connection: Connection, before_unix_s: int) -> None:
    """Delete some answers of before then: more than come, so that none are left in the end."""
    table = schema.idempotent_writes
    oldest = (
        select(table.c.write_sha256)
        .where(table.c.at_unix_s < before_unix_s)
        .order_by(table.c.at_unix_s)
        .limit(_MAX_FORGOTTEN_AT_ONCE)
        # What another write deletes already is its own matter.
        .with_for_update(skip_locked=True)
    )
    connection.execute(delete(table).where(table.c.write_sha256.in_(oldest)))


def _once(
    connection: Connection,
    by: Stamp,
    key: str,
    request: Message,
    kind: type[R],
    work: Callable[[], R],
) -> R:
    table = schema.idempotent_writes
    write_sha256 = hashlib.sha256(f"{by.actor}\0{key}".encode()).digest()
    content = request.SerializeToString(deterministic=True)
    name = request.DESCRIPTOR.full_name.encode()
    request_sha256 = hashlib.sha256(name + b"\0" + content).digest()
    claim = {
        "write_sha256": write_sha256,
        "request_sha256": request_sha256,
        "answer": b"",
        "at_unix_s": by.unix_s,
    }
    this = table.c.write_sha256 == write_sha256
    # Waits for whoever is at the same write in another process.
    if not insert_new(connection, table, [claim]):
        row = connection.execute(select(table).where(this)).one()
        if row.request_sha256 != request_sha256:
            raise InvalidRequest(
                "This idempotency key was used for another request.", param="idempotency-key"
            )
        return kind.FromString(row.answer)
    answer = work()
    kept = kind()
    kept.CopyFrom(answer)
    if isinstance(kept, CreateKeyResponse):
        # Only its hash is kept: who lost it rotates the key.
        kept.api_key = ""
    connection.execute(update(table).where(this).values(answer=kept.SerializeToString()))
    return answer
