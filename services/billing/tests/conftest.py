"""A migrated, priced ledger database, on SQLite and on PostgreSQL.

Migrating takes a while, so it is done once per kind and then copied.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from headrace_billing.audit import Stamp
from headrace_billing.price_file import PACKAGED, load_prices
from headrace_billing.price_store import seed_prices
from headrace_billing.store import Database
from headrace_testing.postgres import LocalPostgres


async def _prepare(url: str) -> None:
    database = Database(url)
    await database.migrate()
    await database.write(lambda it: seed_prices(it, load_prices(PACKAGED), Stamp(1_700_000_000)))
    await database.close()


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file to copy."""
    path = tmp_path_factory.mktemp("template") / "ledger.db"
    asyncio.run(_prepare(f"sqlite:///{path}"))
    return path


@pytest.fixture(scope="session")
def migrated_postgres_url(postgres_server: LocalPostgres) -> str:
    """A PostgreSQL database to copy."""
    url = postgres_server.create_database()
    asyncio.run(_prepare(url))
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a database with tables and the packaged prices."""
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("migrated_file"), tmp_path / "ledger.db")
        yield f"sqlite:///{tmp_path}/ledger.db"
        return
    server: LocalPostgres = request.getfixturevalue("postgres_server")
    url = server.create_database(request.getfixturevalue("migrated_postgres_url"))
    yield url
    server.drop_database(url)


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """A database with tables and the packaged prices."""
    database = Database(database_url)
    yield database
    await database.close()
