"""Responses that are kept: found again by their owner, continued, cancelled, deleted."""

from __future__ import annotations

from dataclasses import dataclass

import orjson
from sqlalchemy import ColumnElement, Connection, RowMapping, delete, select, update

from headrace_common.database import put
from headrace_common.errors import InvalidRequest, NotFound
from headrace_gateway.answer_extras import Json
from headrace_gateway.state.schema import response_events as events
from headrace_gateway.state.schema import responses as table
from headrace_gateway.state.store import Owner, StateStore

# Time without a sign of life after which the process that worked on a response is taken for dead.
LEASE_S = 20
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


class KeptResponses:
    """The responses of all projects.

    Args:
        state: where they are.
        ttl_s: how long each is kept.
    """

    def __init__(self, state: StateStore, ttl_s: int) -> None:
        self._state, self._ttl_s = state, ttl_s

    async def keep(
        self, owner: Owner, response: Json, input_items: list[Json], request_id: str
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
        }
        await self._state.write(lambda it: put(it, table, [row]), owner.tenant_id)

    async def finish(self, response: Json, *where: ColumnElement[bool]) -> bool:
        """Replace a kept response by its finished state; False = it had ended or was deleted."""
        values = {"body": orjson.dumps(response), "lease_until_s": 0}
        running = (table.c.response_id == response["id"], table.c.lease_until_s > 0)
        changed = update(table).where(*running, *where).values(values)
        return await self._state.write(lambda it: it.execute(changed).rowcount > 0)

    async def renew(self, response: Json) -> bool:
        """Show that somebody works on it; return whether it should be cancelled."""
        values: Json = {"lease_until_s": self._state.now_s() + LEASE_S}
        if response["status"] == "in_progress":
            values["body"] = orjson.dumps(response)

        def work(connection: Connection) -> bool:
            changed = (
                update(table)
                .where(table.c.response_id == response["id"], table.c.lease_until_s > 0)
                .values(values)
                .returning(table.c.cancel_wanted)
            )
            wanted = connection.scalar(changed)
            # No row: it was deleted meanwhile.
            return wanted is None or bool(wanted)

        return await self._state.write(work)

    async def find(self, owner: Owner, response_id: str) -> Kept:
        """Return a response.

        Raises:
            NotFound: there is none of this owner's.
        """
        row = await self._state.read(lambda it: _row(it, owner, response_id), owner.tenant_id)
        if row is None:
            raise _not_found(response_id)
        kept, now_s = _kept(row), self._state.now_s()
        if kept.is_finished or row["lease_until_s"] > now_s:
            return kept
        kept.response.update(status="failed", error=_INTERRUPTED)
        await self.finish(kept.response, table.c.lease_until_s <= now_s)
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
                mine = events.c.response_id == response_id
                connection.execute(delete(events).where(mine))
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
