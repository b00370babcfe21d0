"""Versioned DDL: each step runs once, in order, whoever of several processes comes first.

The store holds what may be lost without harm to the books, so it needs no tool of its own for this:
a step is a function, its place in `STEPS` is its version.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection, inspect, select, text

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
    _add_text(connection, schema.idempotency.name, "owner")


def _v4_uploads(connection: Connection) -> None:
    schema.uploads.create(connection, checkfirst=True)


def _v5_keys_of_batches(connection: Connection) -> None:
    _add_text(connection, schema.batches.name, "key_id")


def _add_text(connection: Connection, table: str, name: str) -> None:
    if not any(it["name"] == name for it in inspect(connection).get_columns(table)):
        connection.execute(text(f"ALTER TABLE {table} ADD COLUMN {name} TEXT NOT NULL DEFAULT ''"))


STEPS: tuple[Callable[[Connection], None], ...] = (
    _v1_first_tables,
    _v2_response_events,
    _v3_idempotency_owner,
    _v4_uploads,
    _v5_keys_of_batches,
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
