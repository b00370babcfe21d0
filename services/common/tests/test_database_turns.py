"""A database's threads are its tenants' together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, text

from headrace_common.database import SqlDatabase


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[SqlDatabase]:
    made = SqlDatabase(f"sqlite:///{tmp_path / 'd.sqlite3'}", "test")
    yield made
    await made.close()


def one(connection: Connection) -> int:
    return int(connection.execute(text("SELECT 1")).scalar_one())


async def test_slow_reading_of_one_holds_up_no_other(database: SqlDatabase) -> None:
    """Nor the service itself, however much of it waits."""
    go = threading.Event()
    flood = [asyncio.create_task(database.read(lambda _: go.wait(20), "flood")) for _ in range(30)]
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(30):
            assert await database.read(one, "other") == await database.read(one) == 1
        assert not any(it.done() for it in flood)
    finally:
        go.set()
    assert all(await asyncio.gather(*flood))


async def test_writers_take_turns(database: SqlDatabase) -> None:
    """Another's write comes after the one that runs, not after all that wait."""
    go, done = threading.Event(), list[str]()
    running = asyncio.create_task(database.write(lambda _: go.wait(20), "flood"))
    await asyncio.sleep(0)
    flood = [
        asyncio.create_task(database.write(lambda _: done.append("flood"), "flood"))
        for _ in range(9)
    ]
    await asyncio.sleep(0)
    other = asyncio.create_task(database.write(lambda _: done.append("other"), "other"))
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(running, other, *flood)
    assert done == ["other", *["flood"] * 9]


async def test_closing_waits_for_all_that_was_asked_for(database: SqlDatabase) -> None:
    """Also for what has not begun."""
    asked = [asyncio.create_task(database.write(one)) for _ in range(5)]
    await asyncio.sleep(0)
    await database.close()
    assert [it.result() for it in asked] == [1] * 5
