"""A migrated, priced ledger database, on SQLite and on PostgreSQL.

Migrating takes a while, so it is done once per kind and then copied.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from headrace_billing.audit import Stamp
from headrace_billing.key_store import create_key
from headrace_billing.price_file import PACKAGED, load_prices
from headrace_billing.price_store import seed_prices
from headrace_billing.server import BillingServer
from headrace_billing.settings import BillingSettings
from headrace_billing.store import Database
from headrace_contracts.billing.v1 import billing_pb2 as pb
from headrace_testing.clock import FakeClock
from headrace_testing.office import NOW_UNIX_S, Administered, Office
from headrace_testing.postgres import LocalPostgres
from headrace_testing.waiting import eventually, free_port


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


@pytest.fixture
async def administered(database_url: str, clock: FakeClock) -> AsyncIterator[Administered]:
    """Billing that serves, and the key of an administrator."""
    clock.advance(NOW_UNIX_S - clock.unix_s())
    settings = BillingSettings(
        database_url=database_url, kafka_bootstrap=f"127.0.0.1:{free_port()}"
    )
    server = BillingServer(settings, CollectorRegistry(), clock)
    await server.start()
    await eventually(lambda: server.is_ready, within_s=30)
    database = Database(database_url)
    wanted = pb.Key(tenant_id="ops", name="admin", scopes=["admin"])
    made = await database.write(lambda it: create_key(it, wanted, Stamp(1)))
    await database.close()
    yield Administered(server, made.api_key)
    # Unless the test did.
    if server.is_ready:
        await server.stop(0)


@pytest.fixture
async def office(
    administered: Administered, database: Database, clock: FakeClock
) -> AsyncIterator[Office]:
    """The administrator's HTTP client, and the books behind it."""
    headers = {"authorization": f"Bearer {administered.api_key}"}
    url = f"http://127.0.0.1:{administered.server.admin_port}"
    async with httpx.AsyncClient(base_url=url, headers=headers) as http:
        yield Office(database, http, clock)
