"""The gateway's state: tables made once, what is over is swept."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection, insert, select, text, update

from headrace_gateway.batch_api.stored_batches import StoredBatches
from headrace_gateway.state import schema
from headrace_gateway.state import store as store_module
from headrace_gateway.state.idempotency_records import LEASE_S, ClaimKind, IdempotencyRecords
from headrace_gateway.state.migrations import NewerSchemaError
from headrace_gateway.state.store import Owner, StateStore
from headrace_testing.clock import FakeClock
from headrace_testing.fake_worker import MODEL
from headrace_testing.gateway_fleet import GatewayFleet, chat_body
from headrace_testing.postgres import LocalPostgres
from headrace_testing.waiting import eventually

T = TypeVar("T")
# One side of a race, given its store.
Race = Callable[[StateStore], Awaitable[Any]]


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


async def test_tables_of_an_older_gateway_are_changed(tmp_path: Path, clock: FakeClock) -> None:
    """What they hold stays, and can be worked with."""
    url = f"sqlite:///{tmp_path / 's.sqlite3'}"
    old, new = StateStore(url, clock), StateStore(url, clock)
    await IdempotencyRecords(old, 60).claim(b"r", b"body", "req_1")

    def undo(connection: Connection) -> None:
        connection.execute(text("ALTER TABLE gw_idempotency DROP COLUMN owner"))
        connection.execute(update(schema.meta).values(value=2))

    await old.write(undo)
    records = IdempotencyRecords(new, 60)
    assert (await records.claim(b"r", b"body", "req_2")).kind is ClaimKind.RUNNING
    clock.advance(LEASE_S)
    assert (await records.claim(b"r", b"body", "req_2")).request_id == "req_1"
    await old.close()
    await new.close()


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


async def test_a_frozen_database_is_not_waited_for_without_end(
    own_postgres: LocalPostgres, fleet_parts: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What needs it is refused in time, also while older work still hangs; the rest goes on."""
    monkeypatch.setattr(store_module, "PATIENCE_S", 0.5)
    fleet_parts.settings["state_url"] = own_postgres.create_database()
    await fleet_parts.start()
    try:
        async with fleet_parts.http() as client:
            body = {"model": MODEL, "input": "hi"}
            kept = await client.post("/v1/responses", json=body)
            own_postgres.freeze()
            for _ in range(4):
                answer = await client.get(f"/v1/responses/{kept.json()['id']}")
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            chat = await client.post("/v1/chat/completions", json=chat_body())
            assert chat.status_code == 200
            own_postgres.thaw()

            async def is_back() -> bool:
                answer = await client.get(f"/v1/responses/{kept.json()['id']}")
                return answer.status_code == 200

            await eventually(is_back)
    finally:
        own_postgres.thaw()
        await fleet_parts.close()


class HeldStore(StateStore):
    """Ends no transaction before it is told to."""

    def __init__(self, url: str, clock: FakeClock) -> None:
        super().__init__(url, clock)
        self.has_worked, self.may_end = threading.Event(), threading.Event()

    async def write(self, work: Callable[[Connection], T], whose: str = "") -> T:
        """Do the work, then hold its locks."""

        def held(connection: Connection) -> T:
            done = work(connection)
            self.has_worked.set()
            self.may_end.wait(5)
            return done

        return await super().write(held, whose)


@pytest.fixture
async def race(
    postgres_url: str, clock: FakeClock
) -> AsyncIterator[Callable[[Race, Race], Awaitable[tuple[Any, Any]]]]:
    """Runs a transaction up to its end, then another beside it; returns what came of both."""
    held, other = HeldStore(postgres_url, clock), StateStore(postgres_url, clock)

    async def run(first: Race, second: Race) -> tuple[Any, Any]:
        ahead = asyncio.create_task(first(held))
        await asyncio.to_thread(held.has_worked.wait, 5)
        behind = asyncio.create_task(second(other))
        await asyncio.sleep(0.2)
        held.may_end.set()
        return await ahead, await behind

    await other.sweep()
    yield run
    await held.close()
    await other.close()


async def test_one_process_takes_a_dead_ones_request_over(
    race: Callable[[Race, Race], Awaitable[tuple[Any, Any]]], postgres_url: str, clock: FakeClock
) -> None:
    """Of two that come together the second finds it running."""
    store = StateStore(postgres_url, clock)
    await IdempotencyRecords(store, 600).claim(b"r", b"body", "req_1")
    clock.advance(LEASE_S + 1)
    first, second = await race(
        lambda it: IdempotencyRecords(it, 600).claim(b"r", b"body", "req_2"),
        lambda it: IdempotencyRecords(it, 600).claim(b"r", b"body", "req_3"),
    )
    assert (first.kind, second.kind) == (ClaimKind.OWN, ClaimKind.RUNNING)
    await store.close()


async def test_a_batch_that_moves_while_it_is_cancelled_keeps_both(
    race: Callable[[Race, Race], Awaitable[tuple[Any, Any]]], postgres_url: str, clock: FakeClock
) -> None:
    """Neither change of its object is lost, whichever comes first."""
    owner, store = Owner("t", "p"), StateStore(postgres_url, clock)
    batches = StoredBatches(store, 600)
    await batches.add(owner, b"key", {"id": "b"}, store.now_s() + 600)
    has_moved, _ = await race(
        lambda it: StoredBatches(it, 600).move("b", ("validating",), "in_progress", at=5),
        lambda it: StoredBatches(it, 600).want_cancel(owner, "b"),
    )
    found = await batches.find(owner, "b")
    assert has_moved
    assert (found["status"], found["at"], "cancelling_at" in found) == ("cancelling", 5, True)
    await store.close()


async def test_a_batch_that_is_cancelled_does_not_move_on(
    race: Callable[[Race, Race], Awaitable[tuple[Any, Any]]], postgres_url: str, clock: FakeClock
) -> None:
    """Who would move it learns that it did not."""
    owner, store = Owner("t", "p"), StateStore(postgres_url, clock)
    batches = StoredBatches(store, 600)
    await batches.add(owner, b"key", {"id": "b"}, store.now_s() + 600)
    _, has_moved = await race(
        lambda it: StoredBatches(it, 600).want_cancel(owner, "b"),
        lambda it: StoredBatches(it, 600).move("b", ("validating",), "in_progress", at=5),
    )
    assert not has_moved
    await store.close()
