"""Many rows at once: the same on SQLite and PostgreSQL, whatever the number of rows."""

import pytest
from sqlalchemy import Connection, select
from sqlalchemy.exc import IntegrityError

from headrace_billing import schema
from headrace_billing.store import Database
from headrace_common.bulk_rows import (
    add_rows,
    delete_rows,
    insert_missing_rows,
    insert_new_rows,
    insert_rows,
)


def _event(number: int) -> tuple[str | int | bytes, ...]:
    return (f"r{number}", 2, "t", "k", "log", 2**62 + number, b"\x00\xff%s" + bytes([number % 256]))


@pytest.mark.parametrize("count", [0, 1, 3, 255, 256, 257, 600])
async def test_every_row_arrives_once_in_its_columns(database: Database, count: int) -> None:
    """At the borders of the statements' sizes too; a repeat brings only what is new."""
    rows = [_event(number) for number in range(count)]

    def twice(connection: Connection) -> list[list[tuple[object, ...]]]:
        first = insert_new_rows(connection, schema.usage_events, rows)
        again = insert_new_rows(connection, schema.usage_events, [*rows, _event(9999)])
        return [first, again]

    first, again = await database.write(twice)
    assert first == [row[:2] for row in rows]
    assert again == [("r9999", 2)]
    stored = await database.read(lambda it: it.execute(select(schema.usage_events)).all())
    assert sorted(map(tuple, stored)) == sorted([*rows, _event(9999)])


async def test_a_row_that_comes_twice_in_one_statement_is_new_once(database: Database) -> None:
    """The primary key decides."""
    rows = [_event(1), _event(2), _event(1), _event(2)]
    new = await database.write(lambda it: insert_new_rows(it, schema.usage_events, rows))
    assert sorted(new) == [("r1", 2), ("r2", 2)]


async def test_sums_missing_rows_and_deletes(database: Database) -> None:
    """Each does to a row what its name says."""
    table = schema.balances

    def work(connection: Connection) -> dict[str, int]:
        add_rows(connection, table, [("a", -5), ("b", 2)])
        add_rows(connection, table, [("a", 3), ("c", 7)])
        insert_missing_rows(connection, table, [("b", 100), ("d", 4)])
        delete_rows(connection, table, [("c",), ("nobody",)])
        for run in (insert_rows, insert_missing_rows, add_rows, delete_rows):
            run(connection, table, [])
        return dict(connection.execute(select(table)).all())

    assert await database.write(work) == {"a": -2, "b": 2, "d": 4}


async def test_a_plain_insert_refuses_what_is_there(database: Database) -> None:
    """As an error in the data, with nothing of its batch left behind."""
    await database.write(lambda it: insert_rows(it, schema.balances, [("a", 1)]))
    with pytest.raises(IntegrityError):
        await database.write(lambda it: insert_rows(it, schema.balances, [("b", 1), ("a", 1)]))
    assert await database.read(lambda it: it.execute(select(schema.balances)).all()) == [("a", 1)]


async def test_columns_that_must_be_converted_are_refused(database: Database) -> None:
    """Nothing would convert them."""
    with pytest.raises(TypeError, match="withdrawn"):
        await database.write(lambda it: insert_rows(it, schema.prices, [()]))
