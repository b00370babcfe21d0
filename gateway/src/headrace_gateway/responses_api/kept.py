"""Responses that are kept: found again by their owner, continued, cancelled, deleted.

One that nobody waits for is kept together with what it asks for. Whoever works on it holds a lease;
when that ends, another process claims the response and begins anew::

    keep(work) --> leased --finish--> finished
                     | '--- the lease ends, or is released --> claim: leased again, attempt + 1
                     '----- claimed too often, or to be cancelled ----> finished

A process whose attempt is over changes nothing any more. What has no work, of a gateway that kept
none, is found failed when its lease has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import orjson
from sqlalchemy import ColumnElement, Connection, RowMapping, delete, select, update

from headrace_common.database import put
from headrace_common.errors import InvalidRequest, NotFound
from headrace_gateway.answer_extras import Json
from headrace_gateway.state.schema import response_events as events
from headrace_gateway.state.schema import response_work as work_table
from headrace_gateway.state.schema import responses as table
from headrace_gateway.state.store import Owner, StateStore

# Time without a sign of life after which the process that worked on a response is taken for dead.
LEASE_S = 10
# One that so many processes did not survive, or gave back, is not begun again.
MAX_ATTEMPTS = 8
# A conversation may not be longer.
_MAX_LINKS = 1000
_MAX_BYTES = 16 * 2**20
_INTERRUPTED = {"code": "server_error", "message": "The server stopped before this was finished."}


class PreviousResponseNotFound(InvalidRequest):
    """The response to go on from, or one before it, is not kept, or not the caller's."""

    reason = "PREVIOUS_RESPONSE_NOT_FOUND"
    public_code = "previous_response_not_found"


@dataclass(frozen=True, slots=True)
class Kept:
    """A response as it is kept."""

    response: Json
    input_items: list[Json]
    previous_id: str
    is_finished: bool


@dataclass(frozen=True, slots=True)
class Work:
    """What a response asks for.

    Args:
        key_id: whose limits and policy hold.
        request: the body as it was sent.
    """

    key_id: str
    request: bytes


@dataclass(frozen=True, slots=True)
class Claimed:
    """A response that is this process's to make."""

    response: Json
    tenant_id: str
    request_id: str
    work: Work
    attempt: int


class Hold(Enum):
    """What became of a lease when it was renewed."""

    HELD = "held"
    # Its owner wants no more of it.
    UNWANTED = "unwanted"
    # Another process has it.
    LOST = "lost"


class KeptResponses:
    """The responses of all projects.

    Args:
        state: where they are.
        ttl_s: how long each is kept.
    """

    def __init__(self, state: StateStore, ttl_s: int) -> None:
        self._state, self._ttl_s = state, ttl_s

    async def keep(
        self,
        owner: Owner,
        response: Json,
        input_items: list[Json],
        request_id: str,
        work: Work | None = None,
    ) -> None:
        """Keep a response in its present state; one that is not finished is leased."""
        now_s = self._state.now_s()
        is_finished = response["status"] not in ("queued", "in_progress")
        row = {
            "response_id": response["id"],
            "tenant_id": owner.tenant_id,
            "project_id": owner.project_id,
            "previous_id": response["previous_response_id"] or "",
            "request_id": request_id,
            "body": orjson.dumps(response),
            "input_items": orjson.dumps(input_items),
            "lease_until_s": 0 if is_finished else now_s + LEASE_S,
            "cancel_wanted": 0,
            "created_s": now_s,
            "expires_s": now_s + self._ttl_s,
            "attempt": 1,
        }

        def write(connection: Connection) -> None:
            put(connection, table, [row])
            if work is not None:
                asked = {"key_id": work.key_id, "request": work.request}
                asked |= {it: row[it] for it in ("response_id", "expires_s")}
                put(connection, work_table, [asked])

        await self._state.write(write, owner.tenant_id)

    async def finish(self, response: Json, attempt: int) -> bool:
        """Replace a response by its finished state; False = it had ended, or is another's now."""
        response_id = response["id"]
        return await self._state.write(
            lambda it: _finish(it, response, _held(response_id, attempt))
        )

    async def renew(self, response: Json, attempt: int) -> Hold:
        """Show that somebody works on it."""
        values: Json = {"lease_until_s": self._state.now_s() + LEASE_S}
        if response["status"] == "in_progress":
            values["body"] = orjson.dumps(response)
        is_it = table.c.response_id == response["id"]

        def work(connection: Connection) -> Hold:
            held = _held(response["id"], attempt)
            changed = update(table).where(held).values(values).returning(table.c.cancel_wanted)
            wanted = connection.scalar(changed)
            if wanted is None:
                is_there = connection.scalar(select(table.c.attempt).where(is_it)) is not None
                return Hold.LOST if is_there else Hold.UNWANTED
            return Hold.UNWANTED if wanted else Hold.HELD

        return await self._state.write(work)

    async def release(self, response_id: str, attempt: int) -> None:
        """Let another process go on with it at once."""
        values = {"lease_until_s": self._state.now_s()}
        changed = update(table).where(_held(response_id, attempt)).values(values)
        await self._state.write(lambda it: it.execute(changed))

    async def claim(self) -> Claimed | None:
        """Take a response that nobody works on any more; None = there is none."""
        now_s = self._state.now_s()
        asked = (
            select(table, work_table.c.key_id, work_table.c.request)
            .join(work_table, work_table.c.response_id == table.c.response_id)
            .where(table.c.lease_until_s > 0, table.c.lease_until_s <= now_s)
            .order_by(table.c.lease_until_s, table.c.response_id)
            .limit(1)
            .with_for_update(skip_locked=True)
        )

        def work(connection: Connection) -> Claimed | None:
            while True:
                row = connection.execute(asked).mappings().first()
                if row is None:
                    return None
                response, attempt = orjson.loads(row["body"]), row["attempt"] + 1
                is_it = table.c.response_id == row["response_id"]
                if row["cancel_wanted"]:
                    _finish(connection, {**response, "status": "cancelled"}, is_it)
                elif attempt > MAX_ATTEMPTS:
                    _finish(connection, _interrupted(response), is_it)
                else:
                    lease = {"lease_until_s": now_s + LEASE_S, "attempt": attempt}
                    connection.execute(update(table).where(is_it).values(lease))
                    wanted = Work(row["key_id"], row["request"])
                    tenant_id, request_id = row["tenant_id"], row["request_id"]
                    return Claimed(response, tenant_id, request_id, wanted, attempt)

        return await self._state.write(work)

    async def find(self, owner: Owner, response_id: str) -> Kept:
        """Return a response.

        Raises:
            NotFound: there is none of this owner's.
        """
        has_work = select(work_table.c.key_id).where(work_table.c.response_id == response_id)

        def work(connection: Connection) -> tuple[RowMapping | None, bool]:
            is_asked = connection.scalar(has_work) is not None
            return _row(connection, owner, response_id), is_asked

        row, is_asked = await self._state.read(work, owner.tenant_id)
        if row is None:
            raise _not_found(response_id)
        kept, now_s = _kept(row), self._state.now_s()
        if kept.is_finished or is_asked or row["lease_until_s"] > now_s:
            return kept
        is_left = (table.c.response_id == response_id) & (table.c.lease_until_s.between(1, now_s))
        await self._state.write(lambda it: _finish(it, _interrupted(kept.response), is_left))
        # As it is now: whoever worked on it may have been quicker.
        return await self.find(owner, response_id)

    async def want_cancel(self, response_id: str) -> None:
        """Ask whoever works on it to stop."""
        where = table.c.response_id == response_id
        await self._state.write(
            lambda it: it.execute(update(table).where(where).values(cancel_wanted=1))
        )

    async def delete(self, owner: Owner, response_id: str) -> None:
        """Delete a response.

        Raises:
            NotFound: there is none of this owner's.
        """

        def work(connection: Connection) -> int:
            where = (*_owned(owner), table.c.response_id == response_id)
            deleted = connection.execute(delete(table).where(*where)).rowcount
            if deleted:
                for its in (events, work_table):
                    connection.execute(delete(its).where(its.c.response_id == response_id))
            return deleted

        deleted = await self._state.write(work, owner.tenant_id)
        if not deleted:
            raise _not_found(response_id)

    async def earlier(self, owner: Owner, response_id: str) -> list[Json]:
        """Return the items of a response and of all before it, oldest first; of "" none.

        Raises:
            PreviousResponseNotFound: one of them is not there.
            InvalidRequest: one is not finished, or there are too many.
        """
        if not response_id:
            return []
        chain = await self._state.read(lambda it: _chain(it, owner, response_id), owner.tenant_id)
        items: list[Json] = []
        for kept in reversed(chain):
            items += kept.input_items
            items += kept.response["output"]
        return items


def _held(response_id: str, attempt: int) -> ColumnElement[bool]:
    its = (table.c.response_id == response_id) & (table.c.attempt == attempt)
    return its & (table.c.lease_until_s > 0)


def _finish(connection: Connection, response: Json, where: ColumnElement[bool]) -> bool:
    values = {"body": orjson.dumps(response), "lease_until_s": 0}
    changed = connection.execute(update(table).where(where).values(values)).rowcount > 0
    if changed:
        is_its = work_table.c.response_id == response["id"]
        connection.execute(delete(work_table).where(is_its))
    return changed


def _interrupted(response: Json) -> Json:
    return {**response, "status": "failed", "error": _INTERRUPTED}


def _owned(owner: Owner) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return table.c.tenant_id == owner.tenant_id, table.c.project_id == owner.project_id


def _row(connection: Connection, owner: Owner, response_id: str) -> RowMapping | None:
    asked = select(table).where(*_owned(owner), table.c.response_id == response_id)
    return connection.execute(asked).mappings().first()


def _kept(row: RowMapping) -> Kept:
    return Kept(
        orjson.loads(row["body"]),
        orjson.loads(row["input_items"]),
        row["previous_id"],
        is_finished=row["lease_until_s"] == 0,
    )


def _chain(connection: Connection, owner: Owner, response_id: str) -> list[Kept]:
    param = "previous_response_id"
    chain: list[Kept] = []
    size_bytes = 0
    while response_id:
        row = _row(connection, owner, response_id)
        if row is None:
            what = f"Previous response with id {response_id[:100]!r} not found"
            if chain:
                what += "; the conversation went through it, it was deleted or is too old"
            raise PreviousResponseNotFound(f"{what}.", param=param)
        size_bytes += len(row["body"]) + len(row["input_items"])
        if len(chain) >= _MAX_LINKS or size_bytes > _MAX_BYTES:
            raise InvalidRequest("The conversation is too long.", param=param)
        kept = _kept(row)
        if kept.response["status"] not in ("completed", "incomplete"):
            raise InvalidRequest(
                f"Previous response {response_id[:100]!r} is {kept.response['status']}; only one "
                "that is completed can be continued.",
                param=param,
            )
        chain.append(kept)
        response_id = kept.previous_id
    return chain


def _not_found(response_id: str) -> NotFound:
    return NotFound(f"Response {response_id[:100]!r} not found.", param="response_id")
