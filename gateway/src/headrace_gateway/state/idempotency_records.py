"""Idempotency records: who has claimed a key, and the answer once there is one.

::

    (none) --claim--> running --keep--> finished --expiry--> (none)
                        |  '--- release: refused or failed ---> (none)
                        '-- its process dies --> lease over --> claimed again, same request id
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import orjson
from sqlalchemy import Connection, delete, select, update

from headrace_common.database import insert_new
from headrace_gateway.error_body import Headers
from headrace_gateway.state.schema import idempotency as table
from headrace_gateway.state.store import StateStore

LEASE_S = 20


class ClaimKind(Enum):
    """What a claim found."""

    # It is the caller's to answer.
    OWN = "own"
    RUNNING = "running"
    FINISHED = "finished"
    OTHER_BODY = "other_body"


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer as it went out, streams included."""

    status: int
    headers: Headers
    body: bytes


@dataclass(frozen=True, slots=True)
class Claim:
    """What a claim found, and under which request id the request runs or ran."""

    kind: ClaimKind
    request_id: str
    answer: StoredAnswer | None = None


class IdempotencyRecords:
    """Records of all API keys.

    Args:
        state: where they are.
        ttl_s: how long an answer is kept.
    """

    def __init__(self, state: StateStore, ttl_s: int) -> None:
        self._state, self._ttl_s = state, ttl_s

    async def claim(self, record_id: bytes, body_sha256: bytes, request_id: str) -> Claim:
        """Claim a record, or find out what has become of it."""
        now_s = self._state.now_s()
        row = {
            "record_id": record_id,
            "body_sha256": body_sha256,
            "request_id": request_id,
            "lease_until_s": now_s + LEASE_S,
            "status": 0,
            "headers": b"[]",
            "answer": b"",
            "expires_s": now_s + self._ttl_s,
        }

        def work(connection: Connection) -> Claim:
            over = (table.c.record_id == record_id, table.c.expires_s <= now_s)
            connection.execute(delete(table).where(*over))
            if insert_new(connection, table, [row]):
                return Claim(ClaimKind.OWN, request_id)
            return _found(connection, record_id, body_sha256, now_s)

        return await self._state.write(work)

    async def renew(self, record_id: bytes) -> None:
        """Show that the request still runs."""
        until_s = self._state.now_s() + LEASE_S
        where = (table.c.record_id == record_id, table.c.lease_until_s > 0)
        await self._state.write(
            lambda it: it.execute(update(table).where(*where).values(lease_until_s=until_s))
        )

    async def keep(self, record_id: bytes, answer: StoredAnswer) -> None:
        """Keep a complete answer."""
        pairs = [
            [name.decode("latin-1"), value.decode("latin-1")] for name, value in answer.headers
        ]
        values = {
            "lease_until_s": 0,
            "status": answer.status,
            "headers": orjson.dumps(pairs),
            "answer": answer.body,
        }
        where = table.c.record_id == record_id
        await self._state.write(lambda it: it.execute(update(table).where(where).values(values)))

    async def release(self, record_id: bytes) -> None:
        """Give a claim back: nothing came of it that a repetition could get."""
        where = (table.c.record_id == record_id, table.c.lease_until_s > 0)
        await self._state.write(lambda it: it.execute(delete(table).where(*where)))


def _found(connection: Connection, record_id: bytes, body_sha256: bytes, now_s: int) -> Claim:
    row = connection.execute(select(table).where(table.c.record_id == record_id)).mappings().one()
    request_id = row["request_id"]
    if row["body_sha256"] != body_sha256:
        return Claim(ClaimKind.OTHER_BODY, request_id)
    if row["lease_until_s"] == 0:
        headers = [
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in orjson.loads(row["headers"])
        ]
        answer = StoredAnswer(row["status"], headers, row["answer"])
        return Claim(ClaimKind.FINISHED, request_id, answer)
    if row["lease_until_s"] > now_s:
        return Claim(ClaimKind.RUNNING, request_id)
    taken = update(table).where(table.c.record_id == record_id)
    connection.execute(taken.values(lease_until_s=now_s + LEASE_S))
    return Claim(ClaimKind.OWN, request_id)
