"""Background responses that another process goes on with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from headrace_common.errors import Unavailable
from headrace_contracts.usage.v1 import usage_pb2
from headrace_gateway.responses_api import kept as kept_module
from headrace_gateway.responses_api.background import Run
from headrace_gateway.responses_api.event_log import EventLog
from headrace_gateway.responses_api.kept import (
    LEASE_S,
    MAX_ATTEMPTS,
    Claimed,
    Hold,
    KeptResponses,
    Work,
)
from headrace_gateway.responses_api.kept_events import KeptEvents
from headrace_gateway.state import schema
from headrace_gateway.state.store import Owner, StateStore
from headrace_testing.clock import FakeClock
from headrace_testing.fake_worker import MODEL, saying
from headrace_testing.gateway_fleet import GatewayFleet
from headrace_testing.waiting import eventually

OWNER = Owner("t", "p")


def _response(status: str = "queued") -> dict[str, Any]:
    return {"id": "resp_1", "status": status, "previous_response_id": None}


@pytest.fixture(params=["sqlite", "postgres"])
async def state(
    request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock
) -> AsyncIterator[StateStore]:
    url = f"sqlite:///{tmp_path / 's.sqlite3'}"
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_url")
    store = StateStore(url, clock)
    yield store
    await store.close()


async def _kept(state: StateStore) -> KeptResponses:
    kept = KeptResponses(state, 600)
    await kept.keep(OWNER, _response(), [], "req_1", Work("key_1", b"{}"))
    return kept


async def _num_works(state: StateStore) -> int:
    rows = await state.read(lambda it: it.execute(select(schema.response_work)).all())
    return len(rows)


async def test_what_nobody_works_on_is_claimed_once(state: StateStore, clock: FakeClock) -> None:
    """By one of those who ask at the same time; until then it is what it was."""
    kept = await _kept(state)
    assert await kept.claim() is None
    clock.advance(LEASE_S + 1)
    assert (await kept.find(OWNER, "resp_1")).response["status"] == "queued"
    found = await asyncio.gather(*(kept.claim() for _ in range(5)))
    claimed = Claimed(_response(), "t", "req_1", Work("key_1", b"{}"), 2)
    assert [it for it in found if it is not None] == [claimed]
    assert await kept.claim() is None


async def test_who_was_overtaken_changes_nothing(state: StateStore, clock: FakeClock) -> None:
    """It was frozen for longer than its lease."""
    kept, events = await _kept(state), KeptEvents(state, 600)
    clock.advance(LEASE_S + 1)
    assert await kept.claim() is not None
    assert await kept.renew(_response("in_progress"), 1) is Hold.LOST
    assert not await kept.finish(_response("failed"), 1)
    log = EventLog("resp_1", 10.0)
    log.tell("response.created", _response())
    await events.keep(log)
    assert log.is_left
    assert not await events.has_any("resp_1")
    await kept.release("resp_1", 1)
    assert await kept.claim() is None
    assert await kept.renew(_response("in_progress"), 2) is Hold.HELD
    assert await kept.finish(_response("completed"), 2)
    assert (await kept.find(OWNER, "resp_1")).response["status"] == "completed"
    assert await _num_works(state) == 0


async def test_what_is_released_is_claimed_at_once(state: StateStore) -> None:
    """A process that drains does not let others wait for its lease."""
    kept = await _kept(state)
    await kept.release("resp_1", 1)
    claimed = await kept.claim()
    assert claimed is not None
    assert claimed.attempt == 2


async def test_what_nobody_survives_fails(state: StateStore) -> None:
    """A request that kills its process does not kill every one for ever."""
    kept = await _kept(state)
    for attempt in range(1, MAX_ATTEMPTS):
        await kept.release("resp_1", attempt)
        claimed = await kept.claim()
        assert claimed is not None
        assert claimed.attempt == attempt + 1
    await kept.release("resp_1", MAX_ATTEMPTS)
    assert await kept.claim() is None
    found = await kept.find(OWNER, "resp_1")
    assert (found.response["status"], found.is_finished) == ("failed", True)
    assert found.response["error"]["code"] == "server_error"
    assert await _num_works(state) == 0


async def test_what_is_not_wanted_any_more_is_not_begun_again(state: StateStore) -> None:
    """Cancelled after its process had died, or deleted."""
    kept = await _kept(state)
    await kept.want_cancel("resp_1")
    await kept.release("resp_1", 1)
    assert await kept.claim() is None
    assert (await kept.find(OWNER, "resp_1")).response["status"] == "cancelled"
    await _kept(state)
    await kept.release("resp_1", 1)
    await kept.delete(OWNER, "resp_1")
    assert await kept.claim() is None
    assert await _num_works(state) == 0


async def _begin(fleet: GatewayFleet) -> tuple[str, list[Any]]:
    """Begin a streamed response, and read along for a while; return what was told."""
    fleet.worker.switches.delay_per_token_s = 0.05
    async with fleet.openai() as client:
        stream = await client.responses.create(
            model=MODEL, input="hi", background=True, stream=True
        )
        events = aiter(stream)
        told = [await anext(events)]
        while sum(it.type == "response.output_text.delta" for it in told) < 3:
            told.append(await anext(events))
        await stream.close()
    return told[0].response.id, told


async def _until(fleet: GatewayFleet, response_id: str, status: str) -> Any:
    async with fleet.openai() as client:

        async def is_there() -> bool:
            return (await client.responses.retrieve(response_id)).status == status

        await eventually(is_there, within_s=20)
        return await client.responses.retrieve(response_id)


@pytest.fixture
async def hasty(fleet_parts: GatewayFleet) -> AsyncIterator[GatewayFleet]:
    """A fleet whose gateway does not wait for what runs when it stops."""
    fleet_parts.settings = {"drain_grace_s": 0.0}
    await fleet_parts.start()
    yield fleet_parts
    await fleet_parts.close()


async def test_the_next_process_goes_on(hasty: GatewayFleet) -> None:
    """In the same words, from the number that was told last, for one bill."""
    response_id, told = await _begin(hasty)
    await hasty.restart_gateway()
    last = told[-1].sequence_number
    async with hasty.openai() as client:
        stream = await client.responses.retrieve(response_id, stream=True, starting_after=last)
        rest = [event async for event in stream]
        again = [it async for it in await client.responses.retrieve(response_id, stream=True)]
    kept = await _until(hasty, response_id, "completed")
    whole = told + rest
    assert [it.sequence_number for it in whole] == list(range(len(whole)))
    assert [it.model_dump() for it in again] == [it.model_dump() for it in whole]
    text = "".join(it.delta for it in whole if it.type == "response.output_text.delta")
    assert text == kept.output_text == whole[-1].response.output_text
    assert whole[-1].type == "response.completed"
    first, second = hasty.worker.requests
    assert (first.request_id, first.seed) == (second.request_id, second.seed)
    (closed,) = hasty.usage.closed_events()
    assert closed.ending == usage_pb2.ENDING_COMPLETED
    assert closed.usage.output_tokens == kept.usage.output_tokens
    assert kept.created_at == told[0].response.created_at
    assert hasty.gateway.metrics.taken_over._value.get() == 1


async def test_what_is_refused_for_a_while_waits(hasty: GatewayFleet) -> None:
    """The guard is away when another process goes on."""
    hasty.worker.switches.delay_per_token_s = 0.05
    async with hasty.openai() as client:
        made = await client.responses.create(model=MODEL, input="hi", background=True)
    await eventually(lambda: hasty.worker.running, within_s=5)
    await hasty.guard_server.kill()
    await hasty.restart_gateway()
    await eventually(lambda: hasty.gateway.metrics.taken_over._value.get() == 1, within_s=10)
    async with hasty.openai() as client:
        assert (await client.responses.retrieve(made.id)).status in ("queued", "in_progress")
    await hasty.guard_server.start()
    await _until(hasty, made.id, "completed")


async def test_a_key_that_was_revoked_answers_no_more(hasty: GatewayFleet) -> None:
    """What it had begun fails, with the reason."""
    api_key, key = hasty.new_key(project_id=hasty.key.project_id)
    hasty.worker.switches.delay_per_token_s = 0.05
    async with hasty.openai(api_key) as client:
        made = await client.responses.create(model=MODEL, input="hi", background=True)
    await eventually(lambda: hasty.worker.running, within_s=5)
    hasty.billing.revoke(key.key_id)
    await hasty.restart_gateway()
    failed = await _until(hasty, made.id, "failed")
    assert failed.error.code == "invalid_api_key"


async def test_another_text_ends_a_stream(hasty: GatewayFleet) -> None:
    """The model says something else than before, and the beginning was told already."""
    response_id, told = await _begin(hasty)
    hasty.worker.script = saying("Something else, at length.")
    await hasty.restart_gateway()
    await _until(hasty, response_id, "failed")
    async with hasty.openai() as client:
        stream = await client.responses.retrieve(response_id, stream=True)
        events = [event async for event in stream]
    assert [it.model_dump() for it in events[: len(told)]] == [it.model_dump() for it in told]
    assert events[-1].type == "response.failed"
    assert "Something" not in "".join(it.model_dump_json() for it in events)


async def test_a_frozen_process_leaves_it_to_others(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds, when it lives again, that another goes on; who reads along there reads on."""
    monkeypatch.setattr(kept_module, "LEASE_S", 3)
    fleet.settings["state_url"] = f"sqlite:///{fleet.folder}/shared.sqlite3"
    await fleet.restart_gateway()
    fleet.worker.switches.delay_per_token_s = 0.1
    kept = fleet.gateway._responses_api.kept
    renew, has_renewed = kept.renew, asyncio.Event()

    async def renew_late(response: dict[str, Any], attempt: int) -> Hold:
        await eventually(lambda: len(fleet.worker.requests) > 1, within_s=10)
        has_renewed.set()
        return await renew(response, attempt)

    async def claim_nothing() -> None:
        pass

    monkeypatch.setattr(kept, "renew", renew_late)
    monkeypatch.setattr(kept, "claim", claim_nothing)
    async with fleet.openai() as client:
        stream = await client.responses.create(
            model=MODEL, input="hi", background=True, stream=True
        )
        events = aiter(stream)
        told = [await anext(events)]
        await fleet.add_gateway()
        told += [event async for event in events]
        found = await client.responses.retrieve(told[0].response.id)
    assert has_renewed.is_set()
    assert [it.sequence_number for it in told] == list(range(len(told)))
    text = "".join(it.delta for it in told if it.type == "response.output_text.delta")
    assert text == found.output_text
    (closed,) = fleet.usage.closed_events()
    assert closed.usage.output_tokens == found.usage.output_tokens


async def test_a_process_that_was_only_slow_goes_on(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else was there, and it claims what it is still at."""
    monkeypatch.setattr(kept_module, "LEASE_S", 1)
    fleet.worker.switches.delay_per_token_s = 0.1
    kept, attempts = fleet.gateway._responses_api.kept, []
    renew = kept.renew

    async def renew_late(response: dict[str, Any], attempt: int) -> Hold:
        attempts.append(attempt)
        if attempt == 1:
            raise Unavailable("The database does not answer.")
        return await renew(response, attempt)

    monkeypatch.setattr(kept, "renew", renew_late)
    async with fleet.openai() as client:
        made = await client.responses.create(model=MODEL, input="hi", background=True)
    await _until(fleet, made.id, "completed")
    assert max(attempts) > 1
    assert len(fleet.worker.requests) == 1


async def test_a_left_run_that_ends_late_takes_no_other_out(fleet: GatewayFleet) -> None:
    """Its response was claimed anew by the same process meanwhile."""
    background = fleet.gateway._responses_api.background
    queued: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    queued.set_result(_response())

    def begun(until: asyncio.Event) -> Run:
        log = EventLog("resp_1", 10.0)
        run = Run("req_1", "t", _response("in_progress"), log, until.wait, queued)
        background.run(run)
        return run

    ends = asyncio.Event(), asyncio.Event()
    first = begun(ends[0])
    first.log.leave()
    begun(ends[1])
    ends[0].set()
    assert first.task is not None
    await first.task
    await asyncio.sleep(0)
    assert background.goes_on("resp_1", 3)
    ends[1].set()
    await eventually(lambda: not background.goes_on("resp_1", 3))
