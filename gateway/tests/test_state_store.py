"""The gateway's state: tables made once, what is over is swept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import insert, select, update

from headrace_gateway.state import schema
from headrace_gateway.state.migrations import NewerSchemaError
from headrace_gateway.state.store import StateStore
from headrace_testing.clock import FakeClock
from headrace_testing.fake_worker import MODEL
from headrace_testing.gateway_fleet import GatewayFleet


@pytest.fixture
async def store(tmp_path: Path, clock: FakeClock) -> AsyncIterator[StateStore]:
    state = StateStore(f"sqlite:///{tmp_path / 's.sqlite3'}", clock)
    yield state
    await state.close()


def _story(request_id: str, expires_s: int) -> dict[str, object]:
    return {
        "request_id": request_id,
        "tenant_id": "t",
        "project_id": "p",
        "story": b"{}",
        "expires_s": expires_s,
    }


async def test_processes_that_start_together_make_the_tables_once(
    tmp_path: Path, clock: FakeClock
) -> None:
    """The second waits for the lock and finds the work done."""
    url = f"sqlite:///{tmp_path / 's.sqlite3'}"
    stores = [StateStore(url, clock) for _ in range(3)]
    counts = await asyncio.gather(*(it.sweep() for it in stores))
    assert counts == [0, 0, 0]
    for store in stores:
        await store.close()


async def test_only_what_is_over_is_swept(store: StateStore, clock: FakeClock) -> None:
    """A row goes at its time, with what hangs on it."""
    now_s = store.now_s()
    await store.write(
        lambda it: it.execute(
            insert(schema.stories), [_story("old", now_s), _story("new", now_s + 10)]
        )
    )
    file = {
        "file_id": "f", "tenant_id": "t", "project_id": "p", "filename": "a", "purpose": "batch",
        "size_bytes": 1, "created_s": now_s, "expires_s": now_s + 5,
    }  # fmt: skip
    await store.write(lambda it: it.execute(insert(schema.files), file))
    chunk = {"file_id": "f", "chunk_idx": 0, "data": b"x"}
    await store.write(lambda it: it.execute(insert(schema.file_chunks), chunk))
    assert await store.sweep() == 1
    ids = await store.read(lambda it: list(it.scalars(select(schema.stories.c.request_id))))
    assert ids == ["new"]
    clock.advance(6)
    assert await store.sweep() == 1
    assert await store.read(lambda it: it.execute(select(schema.file_chunks)).all()) == []


async def test_tables_of_a_newer_gateway_are_refused(tmp_path: Path, clock: FakeClock) -> None:
    """An old process does not write into tables that it does not understand."""
    url = f"sqlite:///{tmp_path / 's.sqlite3'}"
    first, second = StateStore(url, clock), StateStore(url, clock)
    await first.write(lambda it: it.execute(update(schema.meta).values(value=99)))
    with pytest.raises(NewerSchemaError):
        await second.sweep()
    await first.close()
    await second.close()


async def test_the_tables_work_on_postgresql(postgres_url: str, clock: FakeClock) -> None:
    """The same statements run there."""
    store = StateStore(postgres_url, clock)
    await store.write(lambda it: it.execute(insert(schema.stories), [_story("old", store.now_s())]))
    assert await store.sweep() == 1
    await store.close()


async def test_a_nul_is_the_clients_mistake_on_postgresql(
    postgres_url: str, fleet_parts: GatewayFleet
) -> None:
    """In ids, filters and bodies; what is kept as JSON may hold one."""
    fleet_parts.settings["state_url"] = postgres_url
    await fleet_parts.start()
    ask = {"model": MODEL, "input": "x"}
    batch = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": "a\0"}
    async with fleet_parts.http() as http:
        for path in ("files/a%00", "batches/a%00", "responses/a%00", "files?purpose=a%00"):
            assert (await http.get(f"/v1/{path}")).status_code == 400, path
        earlier = {**ask, "previous_response_id": "a\0"}
        assert (await http.post("/v1/responses", json=earlier)).status_code == 400
        assert (await http.post("/v1/batches", json=batch)).status_code == 400
        labelled = {**ask, "input": "x\0", "metadata": {"a": "b\0"}}
        made = (await http.post("/v1/responses", json=labelled)).json()
        kept = (await http.get(f"/v1/responses/{made['id']}")).json()
        assert kept["metadata"] == {"a": "b\0"}
    await fleet_parts.close()
