"""A migrated, priced ledger database, on SQLite and on PostgreSQL."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace_billing.price_file import PACKAGED, load_prices
from headrace_billing.price_store import seed_prices
from headrace_billing.store import Database


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """A database with tables and the packaged prices."""
    database = Database(database_url)
    await database.migrate()
    await database.write(lambda it: seed_prices(it, load_prices(PACKAGED), 1_700_000_000))
    yield database
    await database.close()
