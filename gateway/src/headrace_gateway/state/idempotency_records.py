"""Idempotency records: who has claimed a key, and the answer once there is one.

::

    (none) --claim--> running --keep--> finished --expiry--> (none)
                        |  '--- release: refused or failed ---> (none)
                        '-- its process dies --> lease over --> claimed again, same request id

A process that was only slow, and whose request is another's by now, changes nothing any more: each
claim has an owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import orjson
from sqlalchemy import ColumnElement, Connection, delete, select, update

from headrace_common.database import insert_new
from headrace_gateway.error_body import Headers
from headrace_gateway.state.schema import idempotency as table
from headrace_gateway.state.store import StateStore

# A repetition waits so long for a process that died. One that is frozen for longer is overtaken:
# both run under one request id, which the ledger books once.
LEASE_S = 8


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

    async def claim(
        self, record_id: bytes, body_sha256: bytes, request_id: str, tenant_id: str = ""
    ) -> Claim:
        """Claim a record, or find out what has become of it; *request_id* owns what it claims."""
        now_s = self._state.now_s()
        row: dict[str, Any] = {  # Any: column values
            "record_id": record_id,
            "body_sha256": body_sha256,
            "request_id": request_id,
            "lease_until_s": now_s + LEASE_S,
            "owner": request_id,
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
            return _found(connection, row, now_s)

        return await self._state.write(work, tenant_id)

    async def renew(self, record_id: bytes, owner: str) -> None:
        """Show that the request still runs."""
        until_s = self._state.now_s() + LEASE_S
        await self._change(record_id, owner, lease_until_s=until_s)

    async def keep(self, record_id: bytes, owner: str, answer: StoredAnswer) -> bool:
        """Keep a complete answer; return False if the record is another's by now."""
        pairs = [
            [name.decode("latin-1"), value.decode("latin-1")] for name, value in answer.headers
        ]
        return await self._change(
            record_id,
            owner,
            lease_until_s=0,
            status=answer.status,
            headers=orjson.dumps(pairs),
            answer=answer.body,
        )

    async def release(self, record_id: bytes, owner: str) -> None:
        """Give a claim back: nothing came of it that a repetition could get."""
        running = _running(record_id, owner)
        await self._state.write(lambda it: it.execute(delete(table).where(*running)))

    async def _change(self, record_id: bytes, owner: str, **values: object) -> bool:
        changed = update(table).where(*_running(record_id, owner)).values(**values)
        return await self._state.write(lambda it: it.execute(changed).rowcount) > 0


def _running(record_id: bytes, owner: str) -> tuple[ColumnElement[bool], ...]:
    return table.c.record_id == record_id, table.c.owner == owner, table.c.lease_until_s > 0


def _found(connection: Connection, wanted: Mapping[str, Any], now_s: int) -> Claim:
    """Look at the record that is there already."""
    this = table.c.record_id == wanted["record_id"]
    row = connection.execute(select(table).where(this)).mappings().one()
    request_id = row["request_id"]
    if row["body_sha256"] != wanted["body_sha256"]:
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
    taken = {name: wanted[name] for name in ("lease_until_s", "owner")}
    connection.execute(update(table).where(this).values(**taken))
    return Claim(ClaimKind.OWN, request_id)
