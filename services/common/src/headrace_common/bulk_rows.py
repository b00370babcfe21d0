"""Many rows at once, for the few places where SQL toolkit overhead per row is what limits them.

A statement is compiled once per table and database; after that rows go to the driver as they are.
Rows are tuples with a value for every column, in the table's order of columns; they are neither
converted nor checked here, so the columns must be of the types in `_PLAIN_TYPES`.

Everything else about these statements is as in `database.py`: they run in the caller's transaction,
the same on SQLite and PostgreSQL, and fail with SQLAlchemy's errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from sqlalchemy import BigInteger, Connection, Dialect, Integer, LargeBinary, Table, Text, delete
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

# What drivers take and give as Python has it.
_PLAIN_TYPES = (BigInteger, Integer, LargeBinary, Text)
# A statement with RETURNING takes so many rows; each size is a statement of its own.
_SIZES = (256, 64, 16, 4, 1)
# Any: column values.
Values = tuple[Any, ...]


def insert_rows(connection: Connection, table: Table, rows: Sequence[Values]) -> None:
    """Insert rows; one that is there already is an error."""
    _run_many(connection, _insert_sql(table, connection.dialect.name), rows)


def insert_missing_rows(connection: Connection, table: Table, rows: Sequence[Values]) -> None:
    """Insert the rows whose keys are not there yet."""
    _run_many(connection, _insert_missing_sql(table, connection.dialect.name), rows)


def insert_new_rows(connection: Connection, table: Table, rows: Sequence[Values]) -> list[Values]:
    """Insert the rows whose keys are not there yet; return the keys of those."""
    keys: list[Values] = []
    done = 0
    for size in _SIZES:
        while len(rows) - done >= size:
            sql = _insert_new_sql(table, connection.dialect.name, size)
            values = tuple(chain.from_iterable(rows[done : done + size]))
            # The driver's own rows: SQLAlchemy's are one call each.
            keys.extend(connection.exec_driver_sql(sql, values).cursor.fetchall())
            done += size
    return keys


def add_rows(connection: Connection, table: Table, rows: Sequence[Values]) -> None:
    """Add to the columns outside the key; absent rows start from zero.

    Rows must come in order of their keys, so that two writers cannot wait for one another in a
    ring.
    """
    _run_many(connection, _add_sql(table, connection.dialect.name), rows)


def delete_rows(connection: Connection, table: Table, keys: Iterable[Values]) -> None:
    """Delete the rows with these primary keys, as far as they are there."""
    _run_many(connection, _delete_sql(table, connection.dialect.name), list(keys))


def _run_many(connection: Connection, sql: str, rows: Sequence[Values]) -> None:
    if rows:
        connection.exec_driver_sql(sql, list(rows))


@lru_cache(maxsize=64)
def _insert_sql(table: Table, dialect_name: str) -> str:
    return _text(_insert(table, dialect_name).values(_places(table)), dialect_name)


@lru_cache(maxsize=64)
def _insert_missing_sql(table: Table, dialect_name: str) -> str:
    insert = _insert(table, dialect_name).values(_places(table))
    return _text(insert.on_conflict_do_nothing(), dialect_name)


@lru_cache(maxsize=64)
def _insert_new_sql(table: Table, dialect_name: str, num_rows: int) -> str:
    insert = _insert(table, dialect_name).values([_places(table)] * num_rows)
    returning = insert.on_conflict_do_nothing().returning(*table.primary_key)
    return _text(returning, dialect_name)


@lru_cache(maxsize=64)
def _add_sql(table: Table, dialect_name: str) -> str:
    insert = _insert(table, dialect_name).values(_places(table))
    sums = [column for column in table.columns if not column.primary_key]
    upsert = insert.on_conflict_do_update(
        index_elements=list(table.primary_key),
        set_={column.name: column + insert.excluded[column.name] for column in sums},
    )
    return _text(upsert, dialect_name)


@lru_cache(maxsize=64)
def _delete_sql(table: Table, dialect_name: str) -> str:
    # The value is a place to be filled, as in `_places`.
    wanted = [column == "" for column in table.primary_key]
    return _text(delete(table).where(*wanted), dialect_name)


def _insert(table: Table, dialect_name: str) -> Any:  # Any: two modules with the same insert()
    for column in table.columns:
        if not isinstance(column.type, _PLAIN_TYPES):
            raise TypeError(f"{column} is of a type that must be converted")
    return (sqlite if dialect_name == "sqlite" else postgresql).insert(table)


def _places(table: Table) -> dict[str, None]:
    return dict.fromkeys(table.columns.keys())


def _text(statement: Any, dialect_name: str) -> str:  # Any: as in `_insert`
    """Compile for rows that are filled in by position."""
    dialect: Dialect = (
        sqlite.dialect(paramstyle="qmark")
        if dialect_name == "sqlite"
        else PGDialect_psycopg(paramstyle="format")  # type: ignore[no-untyped-call]  # SQLAlchemy's
    )
    return str(statement.compile(dialect=dialect))
