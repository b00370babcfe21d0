"""Tests of budgets that come back from the ledger: real service, real Redis, a fake ledger."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from headrace_common.clock import SystemClock
from headrace_common.errors import Unavailable
from headrace_common.ids import new_request_id
from headrace_common.lifecycle import Lifecycle
from headrace_contracts.billing.v1.billing_pb2 import GetSpendRequest, GetSpendResponse
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_gateway.clients.ratelimit import RateLimitClient
from headrace_ratelimit.server import RateLimitServer
from headrace_ratelimit.settings import RateLimitSettings
from headrace_testing.fake_billing import FakeBilling, FakeBillingServer
from headrace_testing.servers import LocalServer
from headrace_testing.usage_events import AMOUNT_NANO_USD, closed, opened
from headrace_testing.waiting import eventually

pytestmark = pytest.mark.redis

ADMITTED, DENIED = pb.AdmitResponse.OUTCOME_ADMITTED, pb.AdmitResponse.OUTCOME_DENIED
UNAVAILABLE = pb.AdmitResponse.OUTCOME_UNAVAILABLE
# What `opened` holds.
HOLD_NANO_USD = 10_000
NUMBERS = itertools.count()


class Rig:
    """The service, its Redis, its ledger and a caller."""

    def __init__(self, server: RateLimitServer, store: LocalServer, ledger: FakeBilling) -> None:
        self.server, self.store, self.ledger = server, store, ledger
        self.client = RateLimitClient(server.address, 10)

    async def admit(
        self,
        lease: str = "",
        cost: int = 0,
        budget: int = 100_000,
        tenant_id: str = "acme",
        **fields: bool,
    ) -> pb.AdmitResponse:
        limits = pb.Limits(month_budget_nano_usd=budget, total_budget_nano_usd=budget)
        request = pb.AdmitRequest(
            lease_id=lease or f"lease-{next(NUMBERS)}",
            tenant_id=tenant_id,
            scopes=[pb.Scope(level=pb.LEVEL_KEY, scope_id="key_1", limits=limits)],
            reserve=pb.Amounts(requests=1, cost_nano_usd=cost),
            lease_ms=60_000,
            **fields,
        )
        return await self.client.admit(request)

    async def remaining(self) -> list[int]:
        answer = await self.admit()
        assert (answer.outcome, answer.degraded) == (ADMITTED, False)
        return [state.remaining for state in answer.states]

    async def settle(self, lease: str, cost: int) -> bool:
        actual = pb.Amounts(requests=1, cost_nano_usd=cost)
        request = pb.SettleRequest(lease_id=lease, tenant_id="acme", actual=actual)
        return (await self.client.settle(request)).settled

    async def lose_everything(self) -> None:
        async with redis.asyncio.Redis(port=self.store.port) as client:
            await client.flushall()

    def metric(self, name: str) -> float:
        return self.server.registry.get_sample_value(f"headrace_ratelimit_{name}") or 0.0


@pytest.fixture
async def rig(own_redis: LocalServer) -> AsyncIterator[Rig]:
    ledger = FakeBilling()
    async with FakeBillingServer(ledger) as billing:
        settings = RateLimitSettings(
            redis_url=f"redis://127.0.0.1:{own_redis.port}/0",
            redis_timeout_s=1.0,
            billing_address=billing.address,
        )
        server = RateLimitServer(settings, Lifecycle())
        await server.start()
        it = Rig(server, own_redis, ledger)
        yield it
        await it.client.close()
        await server.stop()


def new_id() -> str:
    return new_request_id(SystemClock())


async def test_what_was_spent_before_the_loss_is_spent_after_it(rig: Rig) -> None:
    """In the middle of use, without a restart of anything: the next answer already knows."""
    assert await rig.remaining() == [100_000, 100_000]
    rig.ledger.book(closed(new_id()))
    await rig.lose_everything()
    assert await rig.remaining() == [100_000 - AMOUNT_NANO_USD] * 2
    assert rig.metric("rebuilt_budgets_total") >= 4


async def test_open_requests_hold_their_money_again_and_settle_as_ever(rig: Rig) -> None:
    """The ledger knows what runs; whoever runs it settles it by its id."""
    running = new_id()
    rig.ledger.book(opened(running))
    assert await rig.remaining() == [100_000 - HOLD_NANO_USD] * 2
    assert await rig.settle(running, 500)
    assert await rig.remaining() == [100_000 - 500] * 2
    assert not await rig.settle(running, 500)


async def test_concurrent_requests_after_a_loss_ask_once_and_overrun_nothing(rig: Rig) -> None:
    """Eight at once on a budget that the ledger says is for one more."""
    for _ in range(3):
        rig.ledger.book(closed(new_id()))
    budget = 3 * AMOUNT_NANO_USD + 100
    answers = await asyncio.gather(*(rig.admit(cost=60, budget=budget) for _ in range(8)))
    outcomes = [answer.outcome for answer in answers]
    assert (outcomes.count(ADMITTED), outcomes.count(DENIED)) == (1, 7)


async def test_one_tenant_that_cannot_be_compared_holds_up_no_other(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question that takes the ledger too long, or that it refuses, comes again each time."""
    ledger = rig.server._ledger
    rebuilder = rig.server._rebuilder
    assert ledger is not None
    assert rebuilder is not None
    get_spend = ledger.get_spend
    await rig.admit(tenant_id="large")
    assert await rig.remaining() == [100_000, 100_000]
    rig.ledger.book(closed(new_id()))

    async def fail_for_one(asked: GetSpendRequest) -> GetSpendResponse:
        if asked.tenant_id == "large":
            raise Unavailable("too much to sum")
        return await get_spend(asked)

    monkeypatch.setattr(ledger, "get_spend", fail_for_one)
    with pytest.raises(Unavailable):
        await rebuilder.recheck()
    assert await rig.remaining() == [100_000 - AMOUNT_NANO_USD] * 2


async def test_an_event_that_the_ledger_had_not_booked_yet_is_seen_later(rig: Rig) -> None:
    """It runs behind; what is missing is asked for again and only raises what is spent."""
    assert await rig.remaining() == [100_000, 100_000]
    rig.ledger.book(closed(new_id()))
    rebuilder = rig.server._rebuilder
    assert rebuilder is not None
    await rebuilder.recheck()
    assert await rig.remaining() == [100_000 - AMOUNT_NANO_USD] * 2
    assert rig.metric("budget_drift_nano_usd") == AMOUNT_NANO_USD
    await rebuilder.recheck()
    assert rig.metric("budget_drift_nano_usd") == 0


async def test_without_the_ledger_prepaid_is_refused_and_postpaid_gets_its_allowance(
    rig: Rig,
) -> None:
    """Nobody knows what is left: as without Redis, until the ledger says it."""
    rig.ledger.book(closed(new_id()))
    rig.ledger.failure = Unavailable("x")
    assert (await rig.admit(prepaid=True)).outcome == UNAVAILABLE
    answer = await rig.admit(cost=5000)
    assert (answer.outcome, answer.degraded) == (ADMITTED, True)
    assert (await rig.admit(cost=1)).outcome == DENIED
    assert rig.metric("ledger_failures_total") >= 3
    rig.ledger.failure = None
    assert await rig.remaining() == [100_000 - AMOUNT_NANO_USD] * 2


async def test_a_store_that_comes_back_with_its_data_is_compared_with_the_ledger(rig: Rig) -> None:
    """It may have lost its last second though its budgets are there."""
    await rig.remaining()
    rebuilder = rig.server._rebuilder
    assert rebuilder is not None
    rebuilder._rechecked.clear()
    rig.ledger.book(closed(new_id()))
    await rebuilder.recheck()
    assert await rig.remaining() == [100_000, 100_000]
    async with redis.asyncio.Redis(port=rig.store.port) as client:
        await client.client_kill_filter(_type="normal", skipme=True)
    await eventually(lambda: rig.metric("store_failures_total") >= 1)
    await eventually(lambda: rig.metric("degraded") == 0)
    assert await rig.remaining() == [100_000, 100_000]
    await rebuilder.recheck()
    assert await rig.remaining() == [100_000 - AMOUNT_NANO_USD] * 2


async def test_a_comparison_that_failed_is_made_up_for_however_late(rig: Rig) -> None:
    """The ledger may be away for longer than a budget is looked at again."""
    await rig.remaining()
    rebuilder = rig.server._rebuilder
    assert rebuilder is not None
    past = {key: (lost, 0.0) for key, (lost, _) in rebuilder._rechecked.items()}
    assert past
    rebuilder._rechecked.update(past)
    rig.ledger.book(closed(new_id()))
    rig.ledger.failure = Unavailable("x")
    with pytest.raises(Unavailable):
        await rebuilder.recheck()
    rig.ledger.failure = None
    await rebuilder.recheck()
    assert await rig.remaining() == [100_000 - AMOUNT_NANO_USD] * 2
    assert not rebuilder._rechecked


async def test_a_lost_slot_is_taken_again_by_its_gateway(rig: Rig) -> None:
    """Renewal says what is unknown; what the ledger brought back is money only."""
    running = new_id()
    rig.ledger.book(opened(running))
    await rig.remaining()
    renewal = pb.RenewRequest(tenant_id="acme", lease_ids=[running], lease_ms=60_000)
    assert list((await rig.client.renew(renewal)).unknown_lease_ids) == [running]
    assert (await rig.admit(running, 7000, restore=True)).outcome == ADMITTED
    assert list((await rig.client.renew(renewal)).unknown_lease_ids) == []
    assert await rig.remaining() == [100_000 - 7000] * 2
