"""Redis frozen, killed and emptied in the middle of load: everybody is answered, and soon."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
import redis

from headrace_common.clock import SystemClock
from headrace_common.ids import new_request_id
from headrace_common.lifecycle import Lifecycle
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_gateway.clients.ratelimit import RateLimitClient
from headrace_ratelimit.server import RateLimitServer
from headrace_ratelimit.settings import RateLimitSettings
from headrace_testing.fake_billing import FakeBilling, FakeBillingServer
from headrace_testing.servers import LocalServer
from headrace_testing.usage_events import closed
from headrace_testing.waiting import eventually

pytestmark = [pytest.mark.redis, pytest.mark.chaos]

ADMITTED, DENIED = pb.AdmitResponse.OUTCOME_ADMITTED, pb.AdmitResponse.OUTCOME_DENIED
UNAVAILABLE = pb.AdmitResponse.OUTCOME_UNAVAILABLE
BUDGET_NANO_USD = 10**9
# Of the budget, in an outage: `overdraft_ratio`.
ALLOWANCE_NANO_USD = BUDGET_NANO_USD // 20
COST_NANO_USD = 1000
NUMBERS = itertools.count()


@dataclass
class Load:
    """Requests that keep coming, of a prepaid and a postpaid key, and what became of them."""

    client: RateLimitClient
    answers: list[tuple[bool, pb.AdmitResponse]] = field(default_factory=list)
    longest_s: float = 0.0
    may_go_on: bool = True

    async def run(self, prepaid: bool) -> None:
        while self.may_go_on:
            started_s = time.monotonic()
            answer = await self.client.admit(request(prepaid=prepaid))
            self.longest_s = max(self.longest_s, time.monotonic() - started_s)
            self.answers.append((prepaid, answer))
            await asyncio.sleep(0.002)

    def degraded(self) -> list[tuple[bool, pb.AdmitResponse]]:
        return [it for it in self.answers if it[1].degraded]


def request(*, prepaid: bool, cost: int = COST_NANO_USD) -> pb.AdmitRequest:
    limits = pb.Limits(requests_per_minute=10**6, total_budget_nano_usd=BUDGET_NANO_USD)
    return pb.AdmitRequest(
        lease_id=f"load-{next(NUMBERS)}",
        tenant_id="acme",
        scopes=[pb.Scope(level=pb.LEVEL_KEY, scope_id="key_1", limits=limits)],
        reserve=pb.Amounts(requests=1, cost_nano_usd=cost),
        lease_ms=60_000,
        prepaid=prepaid,
    )


@pytest.fixture
async def service(own_redis: LocalServer) -> AsyncIterator[tuple[RateLimitServer, FakeBilling]]:
    ledger = FakeBilling()
    async with FakeBillingServer(ledger) as billing:
        settings = RateLimitSettings(
            redis_url=f"redis://127.0.0.1:{own_redis.port}/0", billing_address=billing.address
        )
        server = RateLimitServer(settings, Lifecycle())
        await server.start()
        yield server, ledger
        await server.stop()


def flush(store: LocalServer) -> None:
    with redis.Redis(port=store.port) as client:
        client.flushall()


def unharm(store: LocalServer) -> None:
    """Let it be."""


@pytest.mark.parametrize(
    ("hurt", "heal", "is_outage"),
    [
        (LocalServer.freeze, LocalServer.thaw, True),
        (LocalServer.kill, LocalServer.start, True),
        (flush, unharm, False),
    ],
    ids=["frozen", "killed", "emptied"],
)
async def test_everybody_is_answered_and_no_budget_is_forgotten(
    own_redis: LocalServer,
    service: tuple[RateLimitServer, FakeBilling],
    hurt: Callable[[LocalServer], None],
    heal: Callable[[LocalServer], None],
    is_outage: bool,
) -> None:
    """Prepaid is refused, postpaid gets a bounded allowance, and what was spent stays spent."""
    server, ledger = service
    client = RateLimitClient(server.address, 10)

    def is_degraded() -> bool:
        return server.registry.get_sample_value("headrace_ratelimit_degraded") == 1

    await eventually(lambda: not is_degraded())
    load = Load(client)
    tasks = [asyncio.create_task(load.run(n % 2 == 0)) for n in range(8)]
    await eventually(lambda: len(load.answers) > 50, within_s=20)
    # Nearly all of the budget: an empty store must not give it again.
    for _ in range(3):
        ledger.book(closed(new_request_id(SystemClock())))
    hurt(own_redis)
    try:
        if is_outage:
            await eventually(lambda: len(load.degraded()) > 50 and is_degraded(), within_s=20)
    finally:
        heal(own_redis)
    await eventually(lambda: not is_degraded(), within_s=20)
    before = len(load.answers)
    await eventually(lambda: any(not it.degraded for _, it in load.answers[before:]), within_s=20)
    load.may_go_on = False
    await asyncio.gather(*tasks)

    # Loose: the machine may be busy. The bound itself is 50 ms.
    assert load.longest_s < 2.0
    assert {it.outcome for prepaid, it in load.degraded() if prepaid} <= {UNAVAILABLE}
    granted = [it for prepaid, it in load.degraded() if not prepaid and it.outcome == ADMITTED]
    assert len(granted) * COST_NANO_USD <= ALLOWANCE_NANO_USD
    if is_outage:
        assert granted
    left = (await client.admit(request(prepaid=False, cost=0))).states[1].remaining
    assert left <= BUDGET_NANO_USD - 3 * 3080
    await client.close()


async def test_a_moment_without_redis_gives_no_rate_anew(
    own_redis: LocalServer, service: tuple[RateLimitServer, FakeBilling]
) -> None:
    """What Redis last said was left is all that is granted without it."""
    server, _ = service
    client = RateLimitClient(server.address, 10)

    async def admitted(num_requests: int) -> int:
        asked = [request(prepaid=False) for _ in range(num_requests)]
        for it in asked:
            it.scopes[0].limits.requests_per_minute = 5
        answers = await asyncio.gather(*map(client.admit, asked))
        return [it.outcome for it in answers].count(ADMITTED)

    assert await admitted(3) == 3
    own_redis.freeze()
    try:
        assert await admitted(10) == 2
    finally:
        own_redis.thaw()
    await client.close()


async def test_who_is_refused_without_redis_holds_nothing_there(
    own_redis: LocalServer, service: tuple[RateLimitServer, FakeBilling]
) -> None:
    """Redis may have granted, late, what the local share refused."""
    server, _ = service
    client = RateLimitClient(server.address, 10)

    async def outcome() -> int:
        asked = request(prepaid=True)
        asked.scopes[0].limits.max_concurrent = 1
        answer = await client.admit(asked)
        if answer.outcome == ADMITTED:
            nothing = pb.SettleRequest(lease_id=asked.lease_id, tenant_id=asked.tenant_id)
            await client.settle(nothing)
        return answer.outcome

    assert await outcome() == ADMITTED
    own_redis.freeze()
    try:
        assert await outcome() == UNAVAILABLE
    finally:
        own_redis.thaw()
    await eventually(
        lambda: server.registry.get_sample_value("headrace_ratelimit_degraded") == 0, within_s=20
    )
    assert await outcome() == ADMITTED
    await client.close()
