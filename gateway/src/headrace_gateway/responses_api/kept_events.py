"""Events of background responses in the gateway's state, in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from sqlalchemy import Connection, func, select

from headrace_common.database import put
from headrace_gateway.answer_extras import Json
from headrace_gateway.responses_api.event_log import EventLog, event_of, pieces_of
from headrace_gateway.responses_api.kept import Kept
from headrace_gateway.responses_api.sink import KEEP_ALIVE
from headrace_gateway.state.schema import response_events as table
from headrace_gateway.state.schema import responses
from headrace_gateway.state.store import StateStore

_POLL_S = 0.25
_KEEP_ALIVE_POLLS = 40
# So many times a finished response is looked at whose last event is not there: its process wrote
# the end and then died.
_LAST_POLLS = 12
_LAST_KINDS = (
    b"event: response.completed\n",
    b"event: response.incomplete\n",
    b"event: response.failed\n",
)


class KeptEvents:
    """The events of all projects; who may read them is the caller's to know.

    Args:
        state: where they are.
        ttl_s: how long each is kept.
    """

    def __init__(self, state: StateStore, ttl_s: int) -> None:
        self._state, self._ttl_s = state, ttl_s
        self._keeping = asyncio.Lock()

    async def keep(self, *logs: EventLog) -> None:
        """Write what has come since the last time; a log whose response is another's is left.

        Raises:
            Unavailable: the state cannot do it now.
        """
        async with self._keeping:
            fresh = {it.response_id: it for it in logs if not it.is_kept}
            if not fresh:
                return
            counts = {name: len(it.events) for name, it in fresh.items()}
            rows = [self._row(log) for log in fresh.values()]
            asked = select(responses.c.response_id, responses.c.attempt).where(
                responses.c.response_id.in_(fresh)
            )

            def work(connection: Connection) -> dict[str, int]:
                # Locked, so that of one that is deleted meanwhile nothing stays.
                found = dict(iter(connection.execute(asked.with_for_update())))
                mine = {name for name, attempt in found.items() if fresh[name].attempt == attempt}
                put(connection, table, [it for it in rows if it["response_id"] in mine])
                return found

            attempts = await self._state.write(work)
        for name, log in fresh.items():
            # Of a deleted one nothing is kept, but who reads along is told.
            if attempts.get(name, log.attempt) == log.attempt:
                log.note_kept(counts[name])
            else:
                log.leave()

    def _row(self, log: EventLog) -> Json:
        return {
            "response_id": log.response_id,
            "first_number": log.num_kept,
            "events": b"".join(log.events[log.num_kept :]),
            "expires_s": self._state.now_s() + self._ttl_s,
        }

    async def has_any(self, response_id: str) -> bool:
        """Whether there are events of a response."""
        asked = select(table.c.first_number).where(table.c.response_id == response_id).limit(1)
        return await self._state.read(lambda it: it.scalar(asked)) is not None

    async def read(self, response_id: str, start: int) -> tuple[list[bytes], bool]:
        """Return the events from a number on, as far as they are there, and if the last is."""
        own, first = table.c.response_id == response_id, table.c.first_number
        # The row that holds the number, or the last one.
        since = select(func.max(first)).where(own, first <= start).scalar_subquery()
        asked = select(table).where(own, first >= since).order_by(first)
        rows = await self._state.read(lambda it: it.execute(asked).mappings().all())
        if not rows:
            return [], False
        pieces = pieces_of(b"".join(row["events"] for row in rows))
        return pieces[start - rows[0]["first_number"] :], pieces[-1].startswith(_LAST_KINDS)

    async def follow(
        self, find: Callable[[], Awaitable[Kept]], response_id: str, start: int
    ) -> AsyncIterator[bytes]:
        """Yield events from a number on until the last, while another process makes them.

        Raises:
            NotFound: the response was deleted meanwhile.
        """
        num_polls = num_silent = 0
        while True:
            found = await find()
            events, is_over = await self.read(response_id, start)
            if events:
                start, num_silent = start + len(events), 0
                yield b"".join(events)
            if is_over:
                return
            if found.is_finished:
                num_polls += 1
                if num_polls >= _LAST_POLLS:
                    status = found.response["status"]
                    ending = status if status in ("completed", "incomplete") else "failed"
                    yield event_of(f"response.{ending}", found.response, start)
                    return
            num_silent += 1
            if num_silent % _KEEP_ALIVE_POLLS == 0:
                yield KEEP_ALIVE
            await asyncio.sleep(_POLL_S)
