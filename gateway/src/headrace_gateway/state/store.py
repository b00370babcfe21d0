"""The gateway's durable state: one SQL database, shared by all processes of a gateway.

Nothing here is on the way of an ordinary chat request. The database may be away: what needs it
answers 503 meanwhile, everything else goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

from sqlalchemy import Connection, Table, delete, select
from sqlalchemy.exc import DataError

from headrace_common.clock import Clock
from headrace_common.database import SqlDatabase
from headrace_common.errors import InvalidRequest, Unavailable
from headrace_gateway.principal import Principal
from headrace_gateway.state import schema
from headrace_gateway.state.migrations import migrate

_log = logging.getLogger(__name__)
T = TypeVar("T")

SWEEP_S = 30.0
# Above what the database itself bounds: connecting (5 s) and waiting for a lock (10 s). A frozen
# one bounds nothing.
PATIENCE_S = 15.0
_SWEPT_ROWS = 500
_AWAY_POLL_S = 0.5


# Runs work in a transaction, on a thread.
_Run: TypeAlias = Callable[[Callable[[Connection], T], str], Awaitable[T]]


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose rows: those of one project of one tenant."""

    tenant_id: str
    project_id: str

    @classmethod
    def of(cls, principal: Principal) -> Owner:
        """Return whose rows a caller may see."""
        return cls(principal.tenant_id, principal.project_id)


class StateStore:
    """The one way to the tables. Belongs to one event loop.

    Args:
        url: SQLite in a file, or PostgreSQL.
        clock: for what is over.

    Raises:
        ValueError: the URL is neither.
    """

    def __init__(self, url: str, clock: Clock) -> None:
        self._database = SqlDatabase(url, "gateway")
        self.clock = clock
        self._migrated = False
        self._migrating = asyncio.Lock()

    def now_s(self) -> int:
        """Return the time of records: whole Unix seconds."""
        return int(self.clock.unix_s())

    async def write(self, work: Callable[[Connection], T], whose: str = "") -> T:
        """Run *work* in a transaction that may write; tenants have turns.

        Raises:
            InvalidRequest: PostgreSQL takes no NUL in a text.
            Unavailable: the database cannot do it now.
        """
        return await self._bounded(self._database.write, work, whose)

    async def read(self, work: Callable[[Connection], T], whose: str = "") -> T:
        """Run *work* on one unchanging view of the data; tenants have turns.

        Raises:
            InvalidRequest: PostgreSQL takes no NUL in a text.
            Unavailable: the database cannot do it now.
        """
        return await self._bounded(self._database.read, work, whose)

    async def check(self) -> None:
        """Find out whether the database can ever serve; one that is away may.

        Raises:
            SettingsError: it cannot.
        """
        with contextlib.suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self._database.read(lambda _: None)

    async def keep(self) -> None:
        """Make the tables, then sweep what has expired; run under `supervise`."""
        while True:
            await self.sweep()
            await asyncio.sleep(SWEEP_S)

    async def sweep(self) -> int:
        """Delete rows that are over, a bounded number at a time; return how many were."""
        now_s, total = self.now_s(), 0
        for work in (_sweep_files, _sweep_batches, _sweep_response_events, *_SIMPLE):
            count = _SWEPT_ROWS
            while count == _SWEPT_ROWS:
                count = await self.write(partial(work, now_s=now_s))
                total += count
        return total

    async def close(self) -> None:
        """Wait for running work, let the connections go."""
        await self._database.close()

    async def _bounded(self, run: _Run[T], work: Callable[[Connection], T], whose: str) -> T:
        """Do *work* in time. What is given up may still be done once the database lives again."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._ensure_tables()
                return await run(work, whose)
        except TimeoutError:
            raise Unavailable(
                "The gateway's database does not answer.", retry_after_s=1.0
            ) from None
        except DataError as error:
            raise _not_storable() from error

    async def _ensure_tables(self) -> None:
        if self._migrated:
            return
        async with self._migrating:
            if not self._migrated:
                await self._database.write(migrate)
                self._migrated = True


async def once_there(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call while the state is away: until it answers or is cancelled.

    For what is made and paid for, and nobody waits for at the other end.
    """
    while True:
        try:
            return await call()
        except Unavailable as error:
            _log.info("tried again: %s", error)
            await asyncio.sleep(_AWAY_POLL_S)


def _not_storable() -> InvalidRequest:
    return InvalidRequest("A name or id holds a character that none may hold, such as NUL.")


def _expired(connection: Connection, table: Table, now_s: int) -> list[str | bytes]:
    (key,) = table.primary_key
    rows = select(key).where(table.c.expires_s <= now_s).limit(_SWEPT_ROWS)
    return list(connection.scalars(rows))


class _Sweep(Protocol):
    def __call__(self, connection: Connection, now_s: int) -> int: ...


def _sweeper(table: Table) -> _Sweep:
    (key,) = table.primary_key

    def sweep(connection: Connection, now_s: int) -> int:
        ids = _expired(connection, table, now_s)
        if ids:
            connection.execute(delete(table).where(key.in_(ids)))
        return len(ids)

    return sweep


_SIMPLE = tuple(
    _sweeper(it)
    for it in (
        schema.responses,
        schema.response_work,
        schema.idempotency,
        schema.stories,
        schema.uploads,
    )
)


def _sweep_response_events(connection: Connection, now_s: int) -> int:
    events = schema.response_events
    is_over = events.c.expires_s <= now_s
    ids = list(connection.scalars(select(events.c.response_id).where(is_over).limit(_SWEPT_ROWS)))
    if ids:
        connection.execute(delete(events).where(is_over, events.c.response_id.in_(ids)))
    return len(ids)


def _sweep_files(connection: Connection, now_s: int) -> int:
    ids = _expired(connection, schema.files, now_s)
    if ids:
        connection.execute(delete(schema.file_chunks).where(schema.file_chunks.c.file_id.in_(ids)))
        connection.execute(delete(schema.files).where(schema.files.c.file_id.in_(ids)))
    return len(ids)


def _sweep_batches(connection: Connection, now_s: int) -> int:
    ids = _expired(connection, schema.batches, now_s)
    if ids:
        lines = schema.batch_lines
        connection.execute(delete(lines).where(lines.c.batch_id.in_(ids)))
        connection.execute(delete(schema.batches).where(schema.batches.c.batch_id.in_(ids)))
    return len(ids)
