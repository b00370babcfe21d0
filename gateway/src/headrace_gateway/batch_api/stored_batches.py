"""Batches and their lines in the gateway's state: who works on what, and what has come of it.

::

    validating --> in_progress --> finalizing --> completed | expired | failed
        |               '--> cancelling --> finalizing --> cancelled
        '--> failed

A batch is worked on by one process at a time, the one with its lease. The end of the last lease is
also its place in the queue: one that fails again and again lets the others pass. A line ends once:
it is only changed while it is pending.

Long because what owners may do to a batch and what its runner does are held to the same states.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    Select,
    bindparam,
    delete,
    func,
    not_,
    or_,
    select,
    update,
)

from headrace_common.clock import Clock
from headrace_common.database import insert_new, put
from headrace_common.errors import InvalidRequest, NotFound, RateLimited
from headrace_common.ids import new_request_id
from headrace_gateway.answer_extras import Json
from headrace_gateway.auth import KeyRef
from headrace_gateway.batch_api.input_lines import InputLine
from headrace_gateway.pages import page_of, rows_from
from headrace_gateway.state.schema import batch_lines, batches
from headrace_gateway.state.store import Owner, StateStore

LEASE_S = 20
ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")
WINDOW_S = 86_400
# Of one project, at a time.
MAX_ACTIVE = 100
# Results that are read at once.
_PAGE_LINES = 100
_SUCCEEDED, _FAILED, _PENDING = "succeeded", "failed", "pending"


class BatchOver(InvalidRequest):
    """A batch whose lines are all over was to be cancelled."""

    reason = "BATCH_OVER"
    http_status = 409
    public_code = "batch_over"


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as its runner sees it."""

    batch_id: str
    owner: Owner
    # Whose limits and policy hold for every line.
    key: KeyRef
    status: str
    body: Json
    deadline_s: int


@dataclass(frozen=True, slots=True)
class PendingLine:
    """A line that nobody has answered yet."""

    line_no: int
    custom_id: str
    request_id: str
    body: bytes


class StoredBatches:
    """The batches of all projects.

    Args:
        state: where they are.
        ttl_s: how long a batch is kept after it was made.
        prefix: ids of those that owners see here begin so.
    """

    def __init__(self, state: StateStore, ttl_s: int, prefix: str = "") -> None:
        self._state, self._ttl_s, self._prefix = state, ttl_s, prefix

    @property
    def clock(self) -> Clock:
        """For ids."""
        return self._state.clock

    def now_s(self) -> int:
        """Return the time of records."""
        return self._state.now_s()

    async def add(
        self,
        owner: Owner,
        key_id: str,
        body: Json,
        deadline_s: int,
        lines: Sequence[InputLine] = (),
    ) -> None:
        """Add a batch with its lines; without any, to be validated.

        Raises:
            RateLimited: the project has as many under way as it may.
        """
        now_s = self.now_s()
        row = {
            "batch_id": body["id"],
            "tenant_id": owner.tenant_id,
            "project_id": owner.project_id,
            "key_sha256": b"",
            "key_id": key_id,
            "status": "in_progress" if lines else "validating",
            "body": orjson.dumps(body),
            "lease_owner": "",
            "lease_until_s": now_s,
            "deadline_s": deadline_s,
            "created_s": now_s,
            "expires_s": max(now_s + self._ttl_s, deadline_s + self._ttl_s),
        }

        def work(connection: Connection) -> None:
            if connection.execute(_num_active(owner)).scalar_one() >= MAX_ACTIVE:
                raise RateLimited(
                    f"At most {MAX_ACTIVE} batches of a project may be under way.",
                    retry_after_s=60.0,
                )
            put(connection, batches, [row])
            insert_new(connection, batch_lines, self._rows(body["id"], lines))

        await self._state.write(work, owner.tenant_id)

    async def find(self, owner: Owner, batch_id: str) -> Json:
        """Return a batch's public object.

        Raises:
            NotFound: there is none of this owner's.
        """

        def work(connection: Connection) -> Json | None:
            asked = select(batches).where(*self._shown(owner), batches.c.batch_id == batch_id)
            row = connection.execute(asked).mappings().first()
            return None if row is None else _public(connection, row)

        found = await self._state.read(work, owner.tenant_id)
        if found is None:
            raise NotFound(f"Batch {batch_id[:100]!r} not found.", param="batch_id")
        return found

    async def find_page(
        self,
        owner: Owner,
        limit: int,
        after: str | None,
        before: str | None = None,
        *,
        param: str = "after",
    ) -> Json:
        """Return one page of a project's batches, newest first; lines of no others are counted.

        Args:
            owner: whose.
            limit: of the page.
            after: the last batch before the page; None = it is the first page.
            before: the first batch behind the page, if the list is turned back.
            param: how the client calls *after*.

        Raises:
            NotFound: *after* or *before* is not in the list.
        """
        asked, key = select(batches).where(*self._shown(owner)), batches.c.batch_id
        is_back = before is not None

        def work(connection: Connection) -> Json:
            rows = rows_from(
                connection,
                asked,
                key,
                limit,
                before if is_back else after,
                is_descending=not is_back,
                param="before_id" if is_back else param,
            )
            items = [_public(connection, row) for row in rows]
            return page_of(items, limit, is_back=is_back)

        return await self._state.read(work, owner.tenant_id)

    async def want_cancel(self, owner: Owner, batch_id: str) -> None:
        """Ask for the end of a batch that is not over; of another one nothing changes."""
        now_s = self.now_s()

        def work(connection: Connection) -> None:
            where = (
                *self._shown(owner),
                batches.c.batch_id == batch_id,
                batches.c.status.in_(("validating", "in_progress")),
            )
            body = connection.scalar(select(batches.c.body).where(*where).with_for_update())
            if body is not None:
                changed = {**orjson.loads(body), "cancelling_at": now_s}
                values = {"status": "cancelling", "body": orjson.dumps(changed)}
                connection.execute(update(batches).where(*where).values(values))

        await self._state.write(work, owner.tenant_id)

    async def delete(self, owner: Owner, batch_id: str) -> None:
        """Forget a batch that is over.

        Raises:
            InvalidRequest: it is not.
            NotFound: there is none of this owner's.
        """
        status = (await self.find(owner, batch_id))["status"]
        if status in ACTIVE:
            raise InvalidRequest("Only a batch that has ended can be deleted; cancel it first.")

        def work(connection: Connection) -> None:
            for table in (batch_lines, batches):
                connection.execute(delete(table).where(table.c.batch_id == batch_id))

        await self._state.write(work, owner.tenant_id)

    def _shown(self, owner: Owner) -> tuple[ColumnElement[bool], ...]:
        is_kind = batches.c.batch_id.startswith(self._prefix, autoescape=True)
        return (*_owned(owner), is_kind)

    # --- for the process that works on it ---------------------------------------------------

    async def claim(
        self, worker_id: str, busy: Mapping[str, str], *, of_others: bool = False
    ) -> Batch | None:
        """Take the batch that has waited longest for a worker; None = there is none.

        Args:
            worker_id: who asks; what it lost track of may be taken again.
            busy: batches that are not meant, each with its tenant; others' come before theirs.
            of_others: those tenants have enough.
        """
        now_s = self.now_s()
        is_theirs = batches.c.tenant_id.in_(set(busy.values()))

        def work(connection: Connection) -> Batch | None:
            asked = (
                select(batches)
                .where(
                    batches.c.status.in_(ACTIVE),
                    batches.c.batch_id.not_in(busy),
                    or_(batches.c.lease_until_s <= now_s, batches.c.lease_owner == worker_id),
                    *([not_(is_theirs)] if of_others else []),
                )
                .order_by(is_theirs, batches.c.lease_until_s, batches.c.batch_id)
                .limit(1)
                .with_for_update(skip_locked=True)
            )
            row = connection.execute(asked).mappings().first()
            if row is None:
                return None
            lease = {"lease_owner": worker_id, "lease_until_s": now_s + LEASE_S}
            where = batches.c.batch_id == row["batch_id"]
            connection.execute(update(batches).where(where).values(lease))
            return _batch(row)

        return await self._state.write(work)

    async def renew(self, batch_id: str, worker_id: str) -> str:
        """Keep the lease; return the status, empty if the lease or the batch is lost."""
        until_s = self.now_s() + LEASE_S
        changed = (
            update(batches)
            .where(_leased(batch_id, worker_id))
            .values(lease_until_s=until_s)
            .returning(batches.c.status)
        )
        return await self._state.write(lambda it: it.scalar(changed)) or ""

    async def release(self, batch_id: str, worker_id: str) -> None:
        """Let another process go on with it at once; those that wait already come first."""
        values = {"lease_until_s": self.now_s()}
        changed = update(batches).where(_leased(batch_id, worker_id)).values(values)
        await self._state.write(lambda it: it.execute(changed))

    async def move(
        self, batch_id: str, expected: Sequence[str], status: str, **fields: object
    ) -> bool:
        """Change a batch's status and fields, if it is still in an expected one."""

        def work(connection: Connection) -> bool:
            where = (batches.c.batch_id == batch_id, batches.c.status.in_(expected))
            body = connection.scalar(select(batches.c.body).where(*where).with_for_update())
            if body is None:
                return False
            changed = {**orjson.loads(body), **fields}
            values = {"status": status, "body": orjson.dumps(changed)}
            connection.execute(update(batches).where(*where).values(values))
            return True

        return await self._state.write(work)

    async def add_lines(self, batch_id: str, lines: Sequence[InputLine]) -> None:
        """Add lines with a request id each; those that are there already stay as they are."""
        rows = self._rows(batch_id, lines)
        await self._state.write(lambda it: insert_new(it, batch_lines, rows))

    def _rows(self, batch_id: str, lines: Sequence[InputLine]) -> list[Json]:
        return [
            {
                "batch_id": batch_id,
                "line_no": line.line_no,
                "custom_id": line.custom_id,
                "request_id": new_request_id(self._state.clock),
                "state": _PENDING,
                "request": line.body,
                "result": b"",
            }
            for line in lines
        ]

    async def pending(self, batch_id: str, after_no: int, limit: int) -> list[PendingLine]:
        """Return lines that are to be answered, in order."""
        asked = (
            select(batch_lines)
            .where(
                batch_lines.c.batch_id == batch_id,
                batch_lines.c.state == _PENDING,
                batch_lines.c.line_no > after_no,
            )
            .order_by(batch_lines.c.line_no)
            .limit(limit)
        )
        rows = await self._state.read(lambda it: it.execute(asked).mappings().all())
        return [
            PendingLine(row["line_no"], row["custom_id"], row["request_id"], row["request"])
            for row in rows
        ]

    async def end_line(
        self, batch_id: str, line_no: int, result: bytes, *, succeeded: bool
    ) -> None:
        """Keep a line's result, unless it has one."""
        state = _SUCCEEDED if succeeded else _FAILED
        await self._state.write(lambda it: _end_lines(it, batch_id, state, [(line_no, result)]))

    async def drop_lines(self, batch_id: str, results: Sequence[tuple[int, bytes]]) -> None:
        """Keep that lines were never answered: their numbers, and what is told of each."""
        await self._state.write(lambda it: _end_lines(it, batch_id, _FAILED, results))

    async def results(
        self, batch_id: str, after_no: int, limit: int, *, succeeded: bool | None
    ) -> list[tuple[int, bytes]]:
        """Return results of one kind, or of both, in order: line numbers and texts."""
        state = batch_lines.c.state
        kinds = {True: (_SUCCEEDED,), False: (_FAILED,), None: (_SUCCEEDED, _FAILED)}
        asked = (
            select(batch_lines.c.line_no, batch_lines.c.result)
            .where(
                batch_lines.c.batch_id == batch_id,
                state.in_(kinds[succeeded]),
                batch_lines.c.line_no > after_no,
            )
            .order_by(batch_lines.c.line_no)
            .limit(limit)
        )
        rows = await self._state.read(lambda it: it.execute(asked).all())
        return [(int(line_no), bytes(result)) for line_no, result in rows]

    async def each_result(
        self, batch_id: str, *, succeeded: bool | None = None
    ) -> AsyncIterator[list[bytes]]:
        """Yield the results of one kind, or of both, in order, some at a time."""
        after_no = 0
        while found := await self.results(batch_id, after_no, _PAGE_LINES, succeeded=succeeded):
            after_no = found[-1][0]
            yield [result for _, result in found]


def _num_active(owner: Owner) -> Select[int]:
    is_active = batches.c.status.in_(ACTIVE)
    return select(func.count()).select_from(batches).where(*_owned(owner), is_active)


def _owned(owner: Owner) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return batches.c.tenant_id == owner.tenant_id, batches.c.project_id == owner.project_id


def _leased(batch_id: str, worker_id: str) -> Any:  # Any: a SQL condition
    return (batches.c.batch_id == batch_id) & (batches.c.lease_owner == worker_id)


def _end_lines(
    connection: Connection, batch_id: str, state: str, results: Sequence[tuple[int, bytes]]
) -> None:
    lines = batch_lines.c
    is_one = (lines.batch_id == batch_id) & (lines.line_no == bindparam("no"))
    values = {"state": state, "request": b"", "result": bindparam("told")}
    end = update(batch_lines).where(is_one, lines.state == _PENDING).values(values)
    connection.execute(end, [{"no": line_no, "told": result} for line_no, result in results])


def _batch(row: RowMapping) -> Batch:
    return Batch(
        row["batch_id"],
        Owner(row["tenant_id"], row["project_id"]),
        row["key_id"] or row["key_sha256"],
        row["status"],
        orjson.loads(row["body"]),
        row["deadline_s"],
    )


def _public(connection: Connection, row: RowMapping) -> Json:
    asked = (
        select(batch_lines.c.state, func.count())
        .where(batch_lines.c.batch_id == row["batch_id"])
        .group_by(batch_lines.c.state)
    )
    counts = {row[0]: row[1] for row in connection.execute(asked)}
    return {
        **orjson.loads(row["body"]),
        "status": row["status"],
        "request_counts": {
            "total": sum(counts.values()),
            "completed": counts.get(_SUCCEEDED, 0),
            "failed": counts.get(_FAILED, 0),
        },
    }
