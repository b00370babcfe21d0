"""Versioned DDL: each step runs once, in order, whoever of several processes comes first.

The store holds what may be lost without harm to the books, so it needs no tool of its own for this:
a step is a function, its place in `STEPS` is its version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Column, Connection, inspect, select, text
from sqlalchemy.schema import CreateColumn

from headrace_common.database import lock_for_migration, put
from headrace_gateway.state import schema

# Any number will do as long as nobody else uses it in this database.
_LOCK = 0x6865_6777
_VERSION = "schema"


class NewerSchemaError(Exception):
    """A newer gateway has changed the tables."""


def _v1_first_tables(connection: Connection) -> None:
    schema.metadata.create_all(connection)


def _v2_response_events(connection: Connection) -> None:
    schema.response_events.create(connection, checkfirst=True)


def _v3_idempotency_owner(connection: Connection) -> None:
    _add(connection, schema.idempotency.c.owner)


def _v4_uploads(connection: Connection) -> None:
    schema.uploads.create(connection, checkfirst=True)


def _v5_keys_of_batches(connection: Connection) -> None:
    _add(connection, schema.batches.c.key_id)


def _v6_response_work(connection: Connection) -> None:
    schema.response_work.create(connection, checkfirst=True)
    _add(connection, schema.responses.c.attempt)


def _add(connection: Connection, column: Column[Any]) -> None:  # Any: of whatever type
    table = column.table.fullname
    if not any(it["name"] == column.name for it in inspect(connection).get_columns(table)):
        made = CreateColumn(column).compile(dialect=connection.dialect)
        connection.execute(text(f"ALTER TABLE {table} ADD COLUMN {made}"))


STEPS: tuple[Callable[[Connection], None], ...] = (
    _v1_first_tables,
    _v2_response_events,
    _v3_idempotency_owner,
    _v4_uploads,
    _v5_keys_of_batches,
    _v6_response_work,
)


def migrate(connection: Connection) -> None:
    """Bring the tables up to date.

    Raises:
        NewerSchemaError: they are ahead of this code.
    """
    lock_for_migration(connection, _LOCK)
    version = 0
    if inspect(connection).has_table(schema.meta.name):
        where = schema.meta.c.name == _VERSION
        version = connection.scalar(select(schema.meta.c.value).where(where)) or 0
    if version > len(STEPS):
        raise NewerSchemaError(f"tables of version {version}; this gateway knows {len(STEPS)}")
    for step in STEPS[version:]:
        step(connection)
    put(connection, schema.meta, [{"name": _VERSION, "value": len(STEPS)}])
