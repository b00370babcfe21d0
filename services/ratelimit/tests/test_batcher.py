"""Tests of the way to Redis: batches, outages, callers that leave."""

from __future__ import annotations

import asyncio
import math
import struct
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import redis.asyncio
from prometheus_client import CollectorRegistry

from headrace_common.clock import SystemClock
from headrace_common.errors import Internal
from headrace_common.limits.limiter import Amounts, Charge, Kind, Measure
from headrace_common.limits.plans import ChargeSet, Place, Plan
from headrace_common.redis_pipeline import CommandPart, RedisPipeline, Reply
from headrace_ratelimit.batcher import MAX_BATCH, Batcher, StoreDownError
from headrace_ratelimit.metrics import RateLimitMetrics
from headrace_ratelimit.store import Op, admit_op, renew_op, settle_op
from headrace_testing.servers import LocalServer
from headrace_testing.waiting import eventually, free_port

pytestmark = pytest.mark.redis

SLOT = Charge("slots", Kind.SLOTS, Measure.LEASES, 1000)
MONEY = Charge("money", Kind.TOTAL_BUDGET, Measure.COST, 10**9)


def admit(lease: str, tenant: str = "batcher", charge: Charge = SLOT) -> Op:
    charges = ChargeSet((charge,), (Place(1, 1, "k"),))
    amounts = Amounts(cost_nano_usd=100)
    return admit_op(Plan(tenant, lease, 60_000_000, False, charges, amounts))


@asynccontextmanager
async def running(
    url: str, timeout_s: float = 1.0, registry: CollectorRegistry | None = None
) -> AsyncIterator[Batcher]:
    metrics = RateLimitMetrics(registry or CollectorRegistry())
    batcher = Batcher(url, timeout_s, SystemClock(), metrics)
    await batcher.start()
    try:
        yield batcher
    finally:
        await batcher.close()


def total_of(record: bytes) -> tuple[float, ...]:
    """Return what a scope's record says of its total budget: spent, held (lua/records.lua)."""
    return struct.unpack("<23d", record)[20:22]


def url_of(server: LocalServer) -> str:
    return f"redis://127.0.0.1:{server.port}/0"


async def test_simultaneous_calls_share_a_pipeline_and_get_their_own_answers(
    redis_db_url: str,
) -> None:
    """Natural batching: what is ready goes together."""
    registry = CollectorRegistry()
    async with running(redis_db_url, registry=registry) as batcher:
        replies = await asyncio.gather(*(batcher.call(admit(f"l{n}")) for n in range(200)))
    used = [reply[3] for reply in replies]
    assert used == list(range(1, 201))
    batches = registry.get_sample_value("headrace_ratelimit_batch_calls_count")
    assert batches == math.ceil(200 / MAX_BATCH)


async def test_a_caller_that_leaves_disturbs_nobody(redis_db_url: str) -> None:
    """Its call runs to the end; the next reply on the connection is the next caller's."""
    async with running(redis_db_url) as batcher:
        gone = [asyncio.create_task(batcher.call(admit(f"gone{n}"))) for n in range(5)]
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        replies = [await batcher.call(admit(f"here{n}")) for n in range(3)]
        assert [reply[3] for reply in replies] == [6, 7, 8]


async def test_a_frozen_server_delays_the_first_call_by_the_timeout_and_the_next_not_at_all(
    own_redis: LocalServer,
) -> None:
    """The breaker bounds the time to decide, and closes by itself."""
    registry = CollectorRegistry()
    async with running(url_of(own_redis), 0.05, registry) as batcher:
        await batcher.call(admit("before"))
        own_redis.freeze()
        try:
            # Loose: the machine may be busy. The bound itself is 50 ms.
            async with asyncio.timeout(30):
                with pytest.raises(StoreDownError):
                    await batcher.call(admit("first"))
            # Not even a turn of the loop.
            with pytest.raises(StoreDownError):
                batcher.call(admit("next")).send(None)
            assert registry.get_sample_value("headrace_ratelimit_degraded") == 1
        finally:
            own_redis.thaw()
        await eventually(lambda: batcher.is_up)
        assert registry.get_sample_value("headrace_ratelimit_degraded") == 0
        assert (await batcher.call(admit("after")))[0] == 1


async def test_a_stall_of_this_process_is_not_taken_for_an_outage(redis_db_url: str) -> None:
    """Redis answered in time; nobody was there to read it."""
    async with running(redis_db_url, 0.05) as batcher:
        for n in range(3):
            call = asyncio.create_task(batcher.call(admit(f"l{n}")))
            await asyncio.sleep(0)
            # Blocks the loop while the batch is on its way.
            asyncio.get_running_loop().call_soon(time.sleep, 0.1)
            assert (await call)[0] == 1
        assert batcher.is_up


async def test_a_settlement_of_an_outage_runs_once_redis_is_back(own_redis: LocalServer) -> None:
    """Kept though the caller was told, or left; booked exactly once."""
    async with running(url_of(own_redis), 0.2) as batcher:
        for lease in ("told", "left"):
            await batcher.call(admit(lease, charge=MONEY))
        settles = [
            settle_op("batcher", lease, Amounts(cost_nano_usd=30), []) for lease in ("told", "left")
        ]
        own_redis.freeze()
        try:
            left = asyncio.create_task(batcher.call(settles[1], must_run=True))
            with pytest.raises(StoreDownError):
                await batcher.call(settles[0], must_run=True)
            left.cancel()
            with pytest.raises((asyncio.CancelledError, StoreDownError)):
                await left
        finally:
            own_redis.thaw()
        await eventually(lambda: batcher.is_up)
    async with redis.asyncio.Redis.from_url(url_of(own_redis)) as client:
        spent, held = total_of(await client.get("hr:rl:{batcher}:money"))
    assert (spent, held) == (60, 0)


async def test_a_server_that_comes_back_empty_gets_the_scripts_again(
    own_redis: LocalServer,
) -> None:
    """Scripts are not kept over a restart."""
    async with running(url_of(own_redis)) as batcher:
        await batcher.call(admit("before"))
        own_redis.kill()
        own_redis.start()

        async def answers() -> bool:
            try:
                return (await batcher.call(admit("after")))[0] == 1
            except StoreDownError:
                return False

        await eventually(answers)


async def test_a_flushed_function_is_loaded_within_the_call(
    own_redis: LocalServer,
) -> None:
    """FUNCTION FLUSH costs nobody an answer."""
    async with running(url_of(own_redis)) as batcher:
        await batcher.call(admit("before"))
        async with redis.asyncio.Redis.from_url(url_of(own_redis)) as client:
            await client.function_flush()
        assert (await batcher.call(admit("after")))[0] == 1
        assert batcher.is_up


async def test_starts_without_a_server_and_connects_when_there_is_one(
    own_redis: LocalServer,
) -> None:
    """A dependency that is down at the start does not stop a service."""
    own_redis.kill()
    async with running(url_of(own_redis)) as batcher:
        with pytest.raises(StoreDownError):
            await batcher.call(admit("early"))
        own_redis.start()
        await eventually(lambda: batcher.is_up)


async def test_a_failing_script_fails_its_caller_only(redis_db_url: str) -> None:
    """Bad data under one tenant's key is no outage."""
    async with redis.asyncio.Redis.from_url(redis_db_url) as client:
        await client.set("hr:rl:{bad}:live", "not a sorted set")
    async with running(redis_db_url) as batcher:
        bad, good = await asyncio.gather(
            batcher.call(admit("x", "bad")), batcher.call(admit("x")), return_exceptions=True
        )
        assert isinstance(bad, Internal)
        assert good[0] == 1
        assert batcher.is_up


async def test_money_of_a_lease_granted_without_redis_is_booked_once(redis_db_url: str) -> None:
    """The settlement names the budgets; a repeat changes nothing."""
    command = settle_op(
        "batcher", "foreign", Amounts(cost_nano_usd=7), [(Kind.TOTAL_BUDGET, "money")]
    )
    async with running(redis_db_url) as batcher:
        assert [await batcher.call(command) for _ in range(2)] == [0, 0]
    async with redis.asyncio.Redis.from_url(redis_db_url) as client:
        assert total_of(await client.get("hr:rl:{batcher}:money")) == (7, 0)


async def test_a_port_that_nobody_listens_on_is_reported_once_and_retried() -> None:
    """The state is visible and calls fail at once."""
    async with running(f"redis://127.0.0.1:{free_port()}/0") as batcher:
        assert not batcher.is_up
        with pytest.raises(StoreDownError):
            await batcher.call(renew_op("t", [], 1))


async def test_a_server_that_became_a_replica_is_down_and_everybody_is_answered(
    own_redis: LocalServer,
) -> None:
    """After a failover: it refuses to write, the settlement runs once it is a master again."""
    async with running(url_of(own_redis)) as batcher:
        await batcher.call(admit("l", charge=MONEY))
        async with redis.asyncio.Redis.from_url(url_of(own_redis)) as client:
            await client.replicaof("127.0.0.1", free_port())
            settle = settle_op("batcher", "l", Amounts(cost_nano_usd=30), [])
            async with asyncio.timeout(30):
                answers = await asyncio.gather(
                    batcher.call(settle, must_run=True),
                    batcher.call(admit("other", "others")),
                    return_exceptions=True,
                )
            assert [type(it) for it in answers] == [StoreDownError, StoreDownError]
            await client.replicaof("NO", "ONE")
            await eventually(lambda: batcher.is_up)
            assert total_of(await client.get("hr:rl:{batcher}:money")) == (30, 0)


async def test_a_full_list_of_settlements_loses_only_the_oldest(
    own_redis: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that come while kept ones are on their way to Redis push out none but the oldest."""
    monkeypatch.setattr("headrace_ratelimit.batcher.MAX_KEPT", 4)
    monkeypatch.setattr("headrace_ratelimit.batcher._MAX_KEPT_BATCH", 2)
    leases = [f"l{n}" for n in range(5)]

    def settle(lease: str) -> Op:
        return settle_op("batcher", lease, Amounts(cost_nano_usd=10), [])

    async with running(url_of(own_redis), 0.2) as batcher:
        for lease in leases:
            await batcher.call(admit(lease, charge=MONEY))
        send = RedisPipeline.send
        own_redis.freeze()
        for lease in leases[:4]:
            with pytest.raises(StoreDownError):
                await batcher.call(settle(lease), must_run=True)

        def send_slowly(
            pipeline: RedisPipeline, commands: Sequence[Sequence[CommandPart]]
        ) -> asyncio.Future[list[Reply]]:
            if commands[0][0] == "FCALL" and leases:
                batcher.submit(settle(leases.pop()), lambda _: None, must_run=True)
                leases.clear()
            return send(pipeline, commands)

        monkeypatch.setattr(RedisPipeline, "send", send_slowly)
        own_redis.thaw()
        await eventually(lambda: batcher.is_up)
    async with redis.asyncio.Redis.from_url(url_of(own_redis)) as client:
        assert await client.hlen("hr:rl:{batcher}:holds") == 0
