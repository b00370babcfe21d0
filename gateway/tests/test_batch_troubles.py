"""Batches beside other traffic, and when something is away, full or revoked."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import openai
import pytest

from headrace_common.errors import Unavailable
from headrace_contracts.usage.v1 import usage_pb2
from headrace_gateway.batch_api import batch_routes
from headrace_gateway.batch_api.line_call import LineCaller, LineOutcome
from headrace_gateway.batch_api.stored_batches import StoredBatches
from headrace_gateway.principal import Principal
from headrace_gateway.prompt import PromptEncoder
from headrace_gateway.tries_log import TriesLog
from headrace_testing.batches import (
    check_paid_once,
    ended,
    line,
    results,
    start,
)
from headrace_testing.fake_worker import FakeWorker
from headrace_testing.gateway_fleet import GatewayFleet
from headrace_testing.postgres import LocalPostgres
from headrace_testing.waiting import eventually


async def test_a_revoked_key_ends_its_batch(fleet: GatewayFleet) -> None:
    """What was answered, and is paid for, can still be had by the project's other keys."""
    fleet.worker.switches.delay_per_token_s = 0.05
    mine, key = fleet.new_key(project_id=fleet.key.project_id)
    async with fleet.openai(mine) as owner, fleet.openai() as client:
        batch_id = await start(owner, *[line(f"l{idx}") for idx in range(20)])

        async def some_done() -> bool:
            return (await client.batches.retrieve(batch_id)).request_counts.completed >= 2

        await eventually(some_done, within_s=20)
        fleet.billing.revoke(key.key_id)
        batch = await ended(client, batch_id, "failed")
        good = await results(client, batch.output_file_id)
        rest = await results(client, batch.error_file_id)
    assert [it.code for it in batch.errors.data] == ["invalid_api_key"]
    assert len(good) >= 2
    assert {one["error"]["code"] for one in rest} == {"batch_failed"}
    assert len(good) + len(rest) == 20
    await fleet.settled()


async def test_a_new_secret_of_its_key_changes_nothing_for_a_batch(fleet: GatewayFleet) -> None:
    """It is the key's, not the secret's: keys are rotated while batches run."""
    fleet.worker.switches.delay_per_token_s = 0.05
    mine, key = fleet.new_key(project_id=fleet.key.project_id)
    async with fleet.openai(mine) as owner, fleet.openai() as client:
        batch_id = await start(owner, *[line(f"l{idx}") for idx in range(12)])

        async def some_done() -> bool:
            return (await client.batches.retrieve(batch_id)).request_counts.completed >= 2

        await eventually(some_done, within_s=20)
        fleet.billing.replace_secret(key.key_id)

        async def is_refused() -> bool:
            with contextlib.suppress(openai.AuthenticationError):
                await owner.models.list()
                return False
            return True

        await eventually(is_refused, within_s=5)
        batch = await ended(client, batch_id, "completed")
        good = await results(client, batch.output_file_id)
    assert len(good) == 12
    check_paid_once(fleet, good)
    await fleet.settled()


async def test_a_line_that_breaks_the_gateway_holds_nothing_up(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake of ours is that line's result; the others are answered."""
    encode = PromptEncoder.encode_chat

    def broken(encoder: PromptEncoder, messages: Any, *args: Any) -> Any:
        if messages[-1]["content"] == "b":
            raise ZeroDivisionError
        return encode(encoder, messages, *args)

    monkeypatch.setattr(PromptEncoder, "encode_chat", broken)
    async with fleet.openai() as client:
        batch = await ended(client, await start(client, line("a"), line("b"), line("c")))
        (wrong,) = await results(client, batch.error_file_id)
    assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("b", 500)
    assert batch.request_counts.completed == 2


async def test_a_batch_survives_its_gateway(fleet_parts: GatewayFleet) -> None:
    """Another process goes on: answered lines stay, the others run, each has one result."""
    await fleet_parts.start()
    fleet_parts.worker.switches.delay_per_token_s = 0.05
    async with fleet_parts.openai() as client:
        batch_id = await start(client, *[line(f"l{idx}") for idx in range(12)])

        async def some_done() -> bool:
            counts = (await client.batches.retrieve(batch_id)).request_counts
            return counts is not None and counts.completed >= 2

        await eventually(some_done, within_s=20)
    await fleet_parts.restart_gateway()
    fleet_parts.worker.switches.delay_per_token_s = 0.0
    async with fleet_parts.openai() as client:
        batch = await ended(client, batch_id)
        good = await results(client, batch.output_file_id)
    assert [one["custom_id"] for one in good] == [f"l{idx}" for idx in range(12)]
    assert batch.error_file_id is None
    check_paid_once(fleet_parts, good)
    await fleet_parts.close()


async def test_what_is_paid_is_kept_when_its_gateway_stops(
    fleet_parts: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the disk takes its time to close it: a line is not answered and booked again."""
    real = TriesLog.closed

    def closed(log: TriesLog, event: usage_pb2.UsageEvent) -> asyncio.Future[None]:
        real(log, event)
        loop = asyncio.get_running_loop()
        recorded = loop.create_future()
        loop.call_later(0.5, recorded.set_result, None)
        return recorded

    monkeypatch.setattr(TriesLog, "closed", closed)
    await fleet_parts.start()
    async with fleet_parts.openai() as client:
        batch_id = await start(client, *[line(f"l{idx}") for idx in range(6)])
        await eventually(lambda: fleet_parts.usage.closed_events(), within_s=10)
    await fleet_parts.restart_gateway()
    async with fleet_parts.openai() as client:
        batch = await ended(client, batch_id)
        check_paid_once(fleet_parts, await results(client, batch.output_file_id))
    await fleet_parts.close()


def tries(monkeypatch: pytest.MonkeyPatch) -> list[LineOutcome]:
    """Return a list that gets what comes of each try of a line from now on."""
    outcomes: list[LineOutcome] = []
    real = LineCaller.call

    async def call(*args: Any) -> LineOutcome:
        outcomes.append(await real(*args))
        return outcomes[-1]

    monkeypatch.setattr(LineCaller, "call", call)
    return outcomes


def failing(monkeypatch: pytest.MonkeyPatch, *names: str) -> set[str]:
    """Return a set that gets the names of those calls of the state that fail from now on."""
    failed: set[str] = set()

    def watched(name: str) -> Any:  # Any: a method
        real = getattr(StoredBatches, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return await real(*args, **kwargs)
            except Unavailable:
                failed.add(name)
                raise

        return call

    for name in names:
        monkeypatch.setattr(StoredBatches, name, watched(name))
    return failed


async def test_a_moment_without_the_state_costs_no_answer_twice(
    fleet_parts: GatewayFleet, own_postgres: LocalPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is being answered goes on; its results are kept once they can be."""
    calls = ("claim", "renew", "end_line")
    failed = failing(monkeypatch, *calls)
    fleet_parts.settings["state_url"] = own_postgres.create_database()
    await fleet_parts.start()
    fleet_parts.worker.switches.delay_per_token_s = 0.3
    async with fleet_parts.openai() as client:
        batch_id = await start(client, *[line(f"l{idx}") for idx in range(8)])
        await eventually(lambda: len(fleet_parts.worker.running) == 4)
        await asyncio.to_thread(own_postgres.stop)
        await eventually(lambda: not fleet_parts.worker.running)
        await eventually(lambda: failed == set(calls), within_s=15)
        await asyncio.to_thread(own_postgres.start)
        batch = await ended(client, batch_id)
    assert batch.request_counts.completed == 8
    assert len(fleet_parts.worker.requests) == 8
    await fleet_parts.close()


async def test_a_batch_expires_while_billing_is_away(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows whose the key is, and no line waits beyond the batch's time."""

    class Away:
        async def resolve(self, _digest: bytes) -> None:
            raise Unavailable("away")

    monkeypatch.setattr(batch_routes, "WINDOW_S", 2)
    runner = fleet.gateway._batch_api.runner
    monkeypatch.setattr(runner, "_parts", replace(runner._parts, auth=Away()))
    async with fleet.openai() as client:
        batch = await ended(client, await start(client, line("a"), line("b")), "expired")
    assert batch.request_counts.failed == 2
    assert fleet.worker.requests == []


async def test_batches_wait_while_others_queue(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line begins while a replica says that requests wait."""
    runner, looks = fleet.gateway._batch_api.runner, 0

    def is_busy() -> bool:
        nonlocal looks
        looks += 1
        return fleet.gateway.directory.num_waiting > 0

    monkeypatch.setattr(runner, "_parts", replace(runner._parts, is_busy=is_busy))
    fleet.router.set_waiting("w0", 3)
    await eventually(lambda: fleet.gateway.directory.num_waiting == 3)
    async with fleet.openai() as client:
        batch_id = await start(client, line("a"))
        await eventually(lambda: looks >= 3)
        assert fleet.worker.requests == []
        fleet.router.set_waiting("w0", 0)
        await ended(client, batch_id)


async def test_a_full_fleet_is_tried_again(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that is refused for now waits and is answered later."""
    outcomes = tries(monkeypatch)
    fleet.worker.switches.refuse = True
    async with fleet.openai() as client:
        batch_id = await start(client, line("a"))
        await eventually(lambda: outcomes)
        fleet.worker.switches.refuse = False
        batch = await ended(client, batch_id)
        good = await results(client, batch.output_file_id)
    assert len(good) == 1
    check_paid_once(fleet, good)


async def test_a_model_that_a_starting_worker_may_serve_is_waited_for(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once all have said what they serve, it is unknown."""
    outcomes = tries(monkeypatch)
    fleet.router.has_undescribed_models = True
    fleet.router.set_waiting("w0", 0)
    await eventually(lambda: fleet.gateway.directory.is_starting)
    async with fleet.openai() as client:
        batch_id = await start(client, line("a"), line("b", model="later"))
        await eventually(lambda: any(it.status == 404 for it in outcomes))
        fleet.router.has_undescribed_models = False
        await fleet.add_worker(FakeWorker(worker_id="w1", model="later"))
        batch = await ended(client, batch_id)
        assert batch.request_counts.completed == 2
        batch = await ended(client, await start(client, line("c", model="never")))
        assert batch.request_counts.failed == 1


async def test_a_line_that_can_never_be_answered_is_closed_once(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tries fail until the batch's time is over: one request in the books, opened and closed."""
    monkeypatch.setattr(batch_routes, "WINDOW_S", 4)
    fleet.worker.switches.refuse = True
    async with fleet.openai() as client:
        batch = await ended(client, await start(client, line("a")), "expired")
    assert batch.request_counts.failed == 1
    kinds = [it.kind for it in fleet.usage.events]
    assert kinds == [usage_pb2.UsageEvent.KIND_OPENED, usage_pb2.UsageEvent.KIND_CLOSED]
    await fleet.settled()


async def test_one_tenants_batches_hold_up_no_other(
    fleet: GatewayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by their number, and not by lines that wait to be tried again."""
    other, _ = fleet.new_key(tenant_id="rival")
    really, refused = LineCaller.call, []

    async def call(self: LineCaller, principal: Principal, *rest: Any) -> LineOutcome:
        if principal.tenant_id == "rival":
            return await really(self, principal, *rest)
        refused.append(rest)
        return LineOutcome(429, b"{}", 30.0)

    monkeypatch.setattr(LineCaller, "call", call)
    async with fleet.openai() as client, fleet.openai(other) as rival:
        flood = [await start(client, *(line(f"{idx}") for idx in range(9))) for _ in range(6)]
        await eventually(lambda: refused)
        await ended(rival, await start(rival, line("a"), line("b")))
        for batch_id in flood:
            await client.batches.cancel(batch_id)
