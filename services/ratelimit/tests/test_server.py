"""Tests of the whole service through its contract, with Redis going away and coming back."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator

import pytest

from headrace_common.lifecycle import Lifecycle
from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_ratelimit.server import DESCRIPTOR, RateLimitServer
from headrace_ratelimit.settings import RateLimitSettings
from headrace_testing.servers import LocalServer
from headrace_testing.waiting import eventually, free_port
from headrace_testing.web import fetch

pytestmark = pytest.mark.redis

ADMIT = method_ref(DESCRIPTOR, "Admit", pb.AdmitRequest, pb.AdmitResponse)
SETTLE = method_ref(DESCRIPTOR, "Settle", pb.SettleRequest, pb.SettleResponse)
ADMITTED = pb.AdmitResponse.OUTCOME_ADMITTED
NUMBERS = itertools.count()


class Rig:
    """The service and a caller."""

    def __init__(self, server: RateLimitServer, redis: LocalServer) -> None:
        self.server, self.redis = server, redis
        self.client = SessionClient(server.address)

    async def admit(
        self, cost: int = 10, lease: str = "", *, prepaid: bool = False, budget: int = 1000
    ) -> pb.AdmitResponse:
        limits = pb.Limits(requests_per_minute=100, total_budget_nano_usd=budget)
        request = pb.AdmitRequest(
            lease_id=lease or f"lease-{next(NUMBERS)}",
            tenant_id="acme",
            scopes=[pb.Scope(level=pb.LEVEL_KEY, scope_id="k", limits=limits)],
            reserve=pb.Amounts(requests=1, cost_nano_usd=cost),
            lease_ms=60_000,
            prepaid=prepaid,
        )
        return await self.client.unary(ADMIT, request, timeout_s=10)

    async def settle(self, lease: str, cost: int) -> bool:
        request = pb.SettleRequest(
            lease_id=lease, tenant_id="acme", actual=pb.Amounts(requests=1, cost_nano_usd=cost)
        )
        return (await self.client.unary(SETTLE, request, timeout_s=10)).settled

    def metric(self, name: str, **labels: str) -> float | None:
        return self.server.registry.get_sample_value(f"headrace_ratelimit_{name}", labels)


@pytest.fixture
async def rig(own_redis: LocalServer) -> AsyncIterator[Rig]:
    settings = RateLimitSettings(
        redis_url=f"redis://127.0.0.1:{own_redis.port}/0", redis_timeout_s=0.2
    )
    server = RateLimitServer(settings, Lifecycle())
    await server.start()
    it = Rig(server, own_redis)
    yield it
    await it.client.close()
    await server.stop()


async def test_an_outage_degrades_and_ends_by_itself(rig: Rig) -> None:
    """Rates go on, prepaid money is refused, the flag and the gauge say so."""
    assert not (await rig.admit()).degraded
    rig.redis.kill()
    answer = await rig.admit()
    assert (answer.outcome, answer.degraded) == (ADMITTED, True)
    refused = await rig.admit(prepaid=True)
    assert refused.outcome == pb.AdmitResponse.OUTCOME_UNAVAILABLE
    assert rig.metric("degraded") == 1
    rig.redis.start()
    await eventually(lambda: rig.metric("degraded") == 0)
    assert not (await rig.admit(prepaid=True)).degraded
    assert (
        rig.metric("decisions_total", outcome="unavailable", dimension="none", degraded="true") == 1
    )


async def test_money_spent_in_an_outage_is_in_redis_afterwards(rig: Rig) -> None:
    """A lease from before, one from within: both settled while Redis was frozen."""
    await rig.admit(100, "before")
    rig.redis.freeze()
    try:
        assert (await rig.admit(20, "within")).degraded
        assert await rig.settle("before", 70)
        assert await rig.settle("within", 15)
        assert rig.metric("kept_settlements") == 2
    finally:
        rig.redis.thaw()
    await eventually(lambda: rig.metric("degraded") == 0)
    answer = await rig.admit(0)
    assert answer.states[1].remaining == 1000 - 70 - 15
    assert rig.metric("kept_settlements") == 0


async def test_a_settle_after_the_outage_books_a_lease_from_within(rig: Rig) -> None:
    """The lease is known here, not in Redis; its money goes there all the same."""
    await rig.admit(0)
    rig.redis.freeze()
    try:
        assert (await rig.admit(20, "within")).degraded
    finally:
        rig.redis.thaw()
    await eventually(lambda: rig.metric("degraded") == 0)
    assert await rig.settle("within", 15)
    assert (await rig.admit(0)).states[1].remaining == 1000 - 15


async def test_the_process_serves_and_leaves_on_sigterm(own_redis: LocalServer) -> None:
    """Started as in production: settings from the environment, exit code 0."""
    ports = free_port(), free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "headrace_ratelimit",
        env={
            **os.environ,
            "HEADRACE_RATELIMIT_LISTEN": f"127.0.0.1:{ports[0]}",
            "HEADRACE_RATELIMIT_METRICS_LISTEN": f"127.0.0.1:{ports[1]}",
            "HEADRACE_RATELIMIT_REDIS_URL": f"redis://127.0.0.1:{own_redis.port}/0",
        },
    )

    def ready() -> bool:
        return fetch(f"http://127.0.0.1:{ports[1]}/ready")[0] == 200

    try:
        await eventually(ready, within_s=30)
        client = SessionClient(f"127.0.0.1:{ports[0]}")
        request = pb.AdmitRequest(lease_id="l", tenant_id="t", lease_ms=1000)
        assert (await client.unary(ADMIT, request, timeout_s=10)).outcome == ADMITTED
        await client.close()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
