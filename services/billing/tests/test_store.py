"""The database: migrations, transactions, threads, failures."""

import asyncio
import threading
import time
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, delete, insert, literal, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from headrace_billing import schema
from headrace_billing.store import Database
from headrace_common.database import add_or_insert, insert_new, put
from headrace_common.errors import Unavailable
from headrace_common.settings import SettingsError
from headrace_testing.postgres import LocalPostgres
from headrace_testing.waiting import free_port


async def test_migrations_make_the_tables_that_the_code_expects(database: Database) -> None:
    """schema.py and the migrations never differ."""

    def differences(connection: Connection) -> list[object]:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, schema.metadata))

    assert await database.read(differences) == []


async def test_processes_that_start_together_migrate_once(empty_database_url: str) -> None:
    """The second waits for the lock and finds the work done."""
    databases = [Database(empty_database_url) for _ in range(3)]
    await asyncio.gather(*(it.migrate() for it in databases))
    counters = await databases[0].read(lambda it: it.execute(select(schema.meta)).all())
    assert sorted(counters) == [("prices", 0), ("revision", 1)]
    for database in databases:
        await database.close()


async def test_work_that_raises_leaves_nothing(database: Database) -> None:
    """A transaction is all or nothing."""

    def half(connection: Connection) -> None:
        connection.execute(insert(schema.balances), {"account": "a", "amount_nano_usd": 1})
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        await database.write(half)
    assert await database.read(lambda it: it.execute(select(schema.balances)).all()) == []


@pytest.mark.parametrize("table", ["usage_events", "entries", "postings", "prices"])
async def test_the_books_are_append_only(database: Database, table: str) -> None:
    """The database itself refuses to change or delete what is booked."""
    target = schema.metadata.tables[table]

    def fill(connection: Connection) -> None:
        entry = {"request_id": "r", "kind": "voided", "amount_nano_usd": 0}
        insert_new(connection, schema.entries, [entry])
        posting = {"request_id": "r", "account": "a", "amount_nano_usd": 0}
        insert_new(connection, schema.postings, [posting])
        event = {
            "request_id": "r",
            "kind": 2,
            "tenant_id": "t",
            "key_id": "k",
            "source": "log",
            "amount_nano_usd": 0,
            "payload": b"",
        }
        insert_new(connection, schema.usage_events, [event])

    await database.write(fill)
    column = list(target.columns)[-1]
    statements = [update(target).values({column.name: column}), delete(target)]
    for statement in statements:
        with pytest.raises(DBAPIError, match="append-only"):
            await database.write(lambda it, statement=statement: it.execute(statement))


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("table", schema.APPEND_ONLY)
async def test_what_is_append_only_cannot_be_emptied(database: Database, table: str) -> None:
    """A trigger of rows says nothing to that; SQLite has no TRUNCATE."""
    with pytest.raises(DBAPIError, match="append-only"):
        await database.write(lambda it: it.execute(text(f"TRUNCATE {table} CASCADE")))


async def test_insert_new_tells_which_rows_are_new(database: Database) -> None:
    """Rows whose key is there already are left as they are."""
    rows = [{"account": name, "amount_nano_usd": 1} for name in ("a", "b")]

    def twice(connection: Connection) -> list[list[str]]:
        first = insert_new(connection, schema.balances, rows[:1])
        second = insert_new(connection, schema.balances, rows)
        nothing = insert_new(connection, schema.balances, [])
        return [[row.account for row in found] for found in (first, second, nothing)]

    assert await database.write(twice) == [["a"], ["b"], []]


async def test_sums_add_up_and_puts_replace(database: Database) -> None:
    """The two kinds of upsert."""

    def row(account: str, amount_nano_usd: int) -> dict[str, str | int]:
        return {"account": account, "amount_nano_usd": amount_nano_usd}

    def work(connection: Connection) -> dict[str, int]:
        add_or_insert(connection, schema.balances, [row("a", -5), row("b", 2)])
        add_or_insert(connection, schema.balances, [row("a", 3)])
        put(connection, schema.balances, [{"account": "b", "amount_nano_usd": 9}])
        return dict(connection.execute(select(schema.balances)).all())

    assert await database.write(work) == {"a": -2, "b": 9}


async def test_database_work_never_blocks_the_loop(database: Database) -> None:
    """A slow statement runs on a thread of the database's own."""
    names = []

    def slow(_connection: Connection) -> None:
        names.append(threading.current_thread().name)
        time.sleep(1.0)

    ticks = 0
    work = asyncio.gather(database.write(slow), database.read(slow))
    while not work.done():
        await asyncio.sleep(0.01)
        ticks += 1
    await work
    assert ticks > 5
    assert sorted(name.rsplit("_", 1)[0] for name in names) == ["db-reader", "db-writer"]


async def test_readers_do_not_wait_for_the_writer(database: Database) -> None:
    """They see the state before it."""
    inside, go_on = threading.Event(), threading.Event()

    def write(connection: Connection) -> None:
        connection.execute(insert(schema.balances), {"account": "a", "amount_nano_usd": 1})
        inside.set()
        assert go_on.wait(5)

    writing = asyncio.create_task(database.write(write))
    await asyncio.to_thread(inside.wait, 5)
    assert await database.read(lambda it: it.execute(select(schema.balances)).all()) == []
    go_on.set()
    await writing
    assert len(await database.read(lambda it: it.execute(select(schema.balances)).all())) == 1


async def test_an_error_in_the_data_is_not_taken_for_an_outage(database: Database) -> None:
    """Trying again would not help."""
    row = {"account": None, "amount_nano_usd": 1}
    with pytest.raises(IntegrityError):
        await database.write(lambda it: it.execute(insert(schema.balances), row))


async def test_an_unreachable_database_is_unavailable(tmp_path: Path) -> None:
    """And it works as soon as it is back."""
    nowhere = Database(f"postgresql+psycopg://u@127.0.0.1:{free_port()}/x")
    with pytest.raises(Unavailable):
        await nowhere.migrate()
    await nowhere.close()
    late = Database(f"sqlite:///{tmp_path}/later/ledger.db")
    with pytest.raises(Unavailable):
        await late.migrate()
    (tmp_path / "later").mkdir()
    await late.migrate()
    await late.close()


async def test_a_restarted_postgres_is_found_again(own_postgres: LocalPostgres) -> None:
    """Dead connections are replaced."""
    database = Database(own_postgres.create_database())
    await database.migrate()
    own_postgres.stop()
    with pytest.raises(Unavailable):
        await database.read(lambda it: it.execute(select(schema.meta)).all())
    own_postgres.start()
    assert await database.read(lambda it: it.execute(select(schema.meta)).all())
    await database.close()


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
async def test_a_database_of_another_encoding_is_refused(
    postgres_server: LocalPostgres, encoding: str
) -> None:
    """With a sentence that says what to do; it would give bytes for texts, or lose some."""
    url = postgres_server.create_database(encoding=encoding)
    database = Database(url)
    for work in (database.migrate(), database.read(lambda _: None)):
        with pytest.raises(SettingsError, match=f"{encoding} and must be in UTF8: .* TEMPLATE"):
            await work
    await database.close()
    postgres_server.drop_database(url)


async def test_texts_are_utf8_whatever_the_environment_says(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libpq would take the encoding from there."""
    monkeypatch.setenv("PGCLIENTENCODING", "SQL_ASCII")
    database = Database(postgres_url)
    assert (
        await database.read(lambda it: it.scalar(select(literal("\u00e4\u6c34")))) == "\u00e4\u6c34"
    )
    await database.close()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://u@h/x"])
def test_other_databases_are_refused(url: str) -> None:
    """Memory would lose the books."""
    with pytest.raises(ValueError, match="SQLite file or a PostgreSQL"):
        Database(url)


async def test_sqlite_survives_power_loss_by_its_settings(tmp_path: Path) -> None:
    """WAL with a sync at each commit, on every connection."""
    database = Database(f"sqlite:///{tmp_path}/ledger.db")
    for run in (database.write, database.read):
        found = await run(
            lambda it: [
                it.exec_driver_sql(f"PRAGMA {name}").scalar()
                for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
            ]
        )
        assert found == ["wal", 2, 1, 5000]
    await database.close()
