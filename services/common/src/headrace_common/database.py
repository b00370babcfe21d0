"""A SQL database: one writer, few readers, each on threads of their own, never on the event loop.

Tenants share the threads by turns: one that asks much waits behind itself.

SQLite (WAL, synchronous FULL) and PostgreSQL 15 run the same statements. Work is a plain function
of a connection; it runs in one transaction that is committed when the function returns and rolled
back when it raises. A PostgreSQL database must be encoded in UTF8: any other loses texts, and
SQL_ASCII, which a cluster made under the C locale has by default, gives bytes in place of texts.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import (
    URL,
    Connection,
    Dialect,
    Engine,
    Row,
    Table,
    create_engine,
    event,
    func,
    make_url,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, TimeoutError

from headrace_common.errors import Unavailable
from headrace_common.fair_places import FairThreads
from headrace_common.settings import SettingsError

_log = logging.getLogger(__name__)
T = TypeVar("T")

# One of them is left to others, whoever asks much.
_NUM_READERS = 3
_BUSY_TIMEOUT_MS = 5000


class SqlDatabase:
    """The one way to the tables.

    Args:
        url: such as ``sqlite:////var/lib/headrace/ledger.db`` or
            ``postgresql+psycopg://user@host/name``.
        service: who it is, for the server's list of connections and the text of errors.

    Raises:
        ValueError: neither SQLite in a file nor PostgreSQL.
    """

    def __init__(self, url: str, service: str) -> None:
        self._service = service
        parsed = make_url(url)
        self._writer = _engine(parsed, service, pool_size=1, is_writer=True)
        self._reader = _engine(parsed, service, pool_size=_NUM_READERS, is_writer=False)
        self._writer_thread = FairThreads(1, "db-writer")
        self._reader_threads = FairThreads(_NUM_READERS, "db-reader")
        self._last_failure = ""

    async def write(self, work: Callable[[Connection], T], whose: str = "") -> T:
        """Run *work* in a transaction that may write. One at a time, a tenant's in order.

        Args:
            work: what to do.
            whose: tenant that asks for it; "" = the service itself.

        Raises:
            SettingsError: the database is not encoded in UTF8.
            Unavailable: the database cannot do it now; nothing is known to be written.
        """
        return await self._run(self._writer_thread, self._writer, work, whose)

    async def read(self, work: Callable[[Connection], T], whose: str = "") -> T:
        """Run *work* on one unchanging view of the data.

        Args:
            work: what to do.
            whose: tenant that asks for it; "" = the service itself.

        Raises:
            SettingsError: the database is not encoded in UTF8.
            Unavailable: the database cannot do it now.
        """
        return await self._run(self._reader_threads, self._reader, work, whose)

    async def close(self) -> None:
        """Wait for all work, then let the connections go."""
        await self._writer_thread.finish()
        await self._reader_threads.finish()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._writer.dispose()
        self._reader.dispose()

    async def _run(
        self, threads: FairThreads, engine: Engine, work: Callable[[Connection], T], whose: str
    ) -> T:
        def in_transaction() -> T:
            with engine.begin() as connection:
                return work(connection)

        try:
            result = await threads.run(whose, 1.0, in_transaction)
        except (DBAPIError, TimeoutError) as error:
            if not is_passing(error):
                raise
            if str(error) != self._last_failure:
                self._last_failure = str(error)
                _log.warning("database failed: %s", error)
            raise Unavailable(
                f"The database of {self._service} cannot answer now.", retry_after_s=1.0
            ) from error
        self._last_failure = ""
        return result


def is_passing(error: Exception) -> bool:
    """Tell whether the same work may succeed later: connection, lock, disk, not the data itself."""
    if isinstance(error, (OperationalError, InterfaceError, TimeoutError)):
        return True
    return isinstance(error, DBAPIError) and error.connection_invalidated


def insert_new(
    connection: Connection,
    table: Table,
    rows: Sequence[Mapping[str, Any]],  # Any: column values
    *returning: str,
) -> list[Row[Any]]:  # Any: column values
    """Insert the rows whose keys are not there yet; return the named columns of those."""
    if not rows:
        return []
    insert = _dialect_of(connection).insert(table).on_conflict_do_nothing()
    columns = [table.c[name] for name in returning] or list(table.primary_key)
    return list(connection.execute(insert.returning(*columns), rows))


def add_or_insert(
    connection: Connection,
    table: Table,
    rows: Sequence[Mapping[str, Any]],  # Any: column values
) -> None:
    """Add to the columns outside the key; absent rows start from zero.

    Rows must come in order of their keys, so that two writers cannot wait for one another in a
    ring.
    """
    if not rows:
        return
    insert = _dialect_of(connection).insert(table)
    sums = [column for column in table.columns if not column.primary_key]
    connection.execute(
        insert.on_conflict_do_update(
            index_elements=list(table.primary_key),
            set_={column.name: column + insert.excluded[column.name] for column in sums},
        ),
        rows,
    )


def put(
    connection: Connection,
    table: Table,
    rows: Sequence[Mapping[str, Any]],  # Any: column values
) -> None:
    """Insert rows, or replace those with the same key."""
    if not rows:
        return
    insert = _dialect_of(connection).insert(table)
    keys = list(table.primary_key)
    others = [column.name for column in table.columns if not column.primary_key]
    connection.execute(
        insert.on_conflict_do_update(
            index_elements=keys, set_={name: insert.excluded[name] for name in others}
        ),
        rows,
    )


def lock_for_migration(connection: Connection, number: int) -> None:
    """Let one process at a time pass, until its transaction ends.

    On SQLite the writer's BEGIN IMMEDIATE is the lock already.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(number)))


def _dialect_of(connection: Connection) -> Any:  # Any: two modules with the same insert()
    return sqlite if connection.dialect.name == "sqlite" else postgresql


def _engine(url: URL, service: str, *, pool_size: int, is_writer: bool) -> Engine:
    match url.get_backend_name():
        case "sqlite" if url.database not in (None, "", ":memory:"):
            return _sqlite_engine(url, pool_size, is_writer=is_writer)
        case "postgresql":
            engine = create_engine(
                url.set(drivername="postgresql+psycopg"),
                pool_size=pool_size,
                max_overflow=0,
                pool_pre_ping=True,
                isolation_level="READ COMMITTED" if is_writer else "REPEATABLE READ",
                connect_args={
                    "connect_timeout": 5,
                    "client_encoding": "utf8",
                    "application_name": f"headrace-{service}",
                    "options": "-c lock_timeout=10s -c idle_in_transaction_session_timeout=60s",
                },
            )
            event.listen(engine, "do_connect", _connect_to_utf8)
            return engine
        case _:
            raise ValueError("the database URL must name a SQLite file or a PostgreSQL database")


def _connect_to_utf8(
    dialect: Dialect, _record: object, cargs: tuple[Any, ...], cparams: dict[str, Any]
) -> Any:  # Any: the driver's arguments and connection
    # Before SQLAlchemy asks anything: of SQL_ASCII it could not even read the version.
    raw: Any = dialect.connect(*cargs, **cparams)
    encoding = raw.info.parameter_status("server_encoding")
    # A pooler in between may not tell.
    if encoding in (None, "UTF8"):
        return raw
    name = raw.info.dbname
    raw.close()
    raise SettingsError(
        f"the database {name} is encoded in {encoding} and must be in UTF8: make one by "
        f"CREATE DATABASE {name}_utf8 ENCODING 'UTF8' TEMPLATE template0 and name that instead"
    )


def _use_wal(raw: Any) -> None:  # Any: sqlite3.Connection behind its proxy
    # SQLite does not wait for others here, whatever busy_timeout says: two that open a new file at
    # once would exclude each other for a moment (sqlite.org/wal.html, "Sometimes Queries Return
    # SQLITE_BUSY In WAL Mode").
    deadline_s = time.monotonic() + _BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            raw.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy or time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)
        else:
            return


def _sqlite_engine(url: URL, pool_size: int, *, is_writer: bool) -> Engine:
    engine = create_engine(
        url, pool_size=pool_size, max_overflow=0, connect_args={"check_same_thread": False}
    )

    @event.listens_for(engine, "connect")
    def prepare(raw: Any, _record: object) -> None:  # Any: sqlite3.Connection behind its proxy
        # The driver must not begin transactions by itself: `begin` below does.
        raw.isolation_level = None
        raw.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
        _use_wal(raw)
        raw.execute("PRAGMA synchronous = FULL")
        raw.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A writer that began as a reader could not become one once somebody else has written.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writer else "BEGIN")

    return engine
