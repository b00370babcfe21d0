"""Billing's database: the common one with the tables of the books, kept current by Alembic."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

from headrace_common.database import SqlDatabase, lock_for_migration

# Any number will do as long as nobody else uses it in this database.
_MIGRATION_LOCK = 0x6865_6164
_MIGRATIONS = Path(__file__).parent / "migrations"


class Database(SqlDatabase):
    """The one way to the books.

    Args:
        url: such as ``sqlite:////var/lib/headrace/ledger.db`` or
            ``postgresql+psycopg://user@host/name``.

    Raises:
        ValueError: neither SQLite in a file nor PostgreSQL.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url, "billing")

    async def migrate(self) -> None:
        """Bring the tables up to date. Safe to run at the same time elsewhere: it takes a lock.

        Raises:
            Unavailable: the database cannot be reached.
        """
        await self.write(_upgrade)


def _upgrade(connection: Connection) -> None:
    lock_for_migration(connection, _MIGRATION_LOCK)
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
