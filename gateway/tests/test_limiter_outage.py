"""What a gateway decides while it cannot reach the rate limiter, and how that is made up for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from headrace_common.errors import (
    Deadline,
    HeadraceError,
    Internal,
    InvalidRequest,
    ReplicaLost,
)
from headrace_common.limits.local_share import LocalShare
from headrace_common.rpc import Call
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_gateway.limiter_outage import OutageProofLimiter
from headrace_gateway.metrics import GatewayMetrics
from headrace_testing.clock import FakeClock
from headrace_testing.fake_ratelimit import FakeRateLimit
from headrace_testing.waiting import eventually

ADMITTED, DENIED = pb.AdmitResponse.OUTCOME_ADMITTED, pb.AdmitResponse.OUTCOME_DENIED
MONTH_NANO_USD = 1_000_000


class Far:
    """The fake rate limiter, and the way to it: calls and answers can get lost."""

    def __init__(self, clock: FakeClock) -> None:
        self.fake = FakeRateLimit(clock)
        self.is_reachable = True
        # How many of the calls, or of their answers, get lost.
        self.loss_ratio, self.chosen = 0.0, random.Random(0)
        # The next answers, whatever becomes of later ones.
        self.num_lost_answers = 0
        self.objection: HeadraceError | None = None

    async def admit(self, request: pb.AdmitRequest) -> pb.AdmitResponse:
        return await self._run(lambda: self.fake.Admit(request, Call(None)))

    async def settle(self, request: pb.SettleRequest) -> pb.SettleResponse:
        return await self._run(lambda: self.fake.Settle(request, Call(None)))

    def settle_soon(self, request: pb.SettleRequest) -> asyncio.Future[pb.SettleResponse]:
        return asyncio.create_task(self.settle(request))

    async def renew(self, request: pb.RenewRequest) -> pb.RenewResponse:
        return await self._run(lambda: self.fake.Renew(request, Call(None)))

    async def _run(self, call: Callable) -> pb.AdmitResponse:  # type: ignore[type-arg]
        await asyncio.sleep(0)
        if not self.is_reachable:
            raise ReplicaLost("refused")
        if self.objection is not None:
            raise self.objection
        fate = self.chosen.random()
        if fate < self.loss_ratio / 2:
            raise ReplicaLost("cut")
        answer = await call()
        self.num_lost_answers -= 1
        if fate < self.loss_ratio or self.num_lost_answers >= 0:
            raise Deadline("late")
        return answer


class Rig:
    """An outage-proof limiter over a far one, with standing clocks."""

    def __init__(self, num_replicas: int = 1, overdraft_ratio: float = 0.05) -> None:
        self.clock = FakeClock()
        self.far = Far(self.clock)
        self.registry = CollectorRegistry()
        share = LocalShare(num_replicas, overdraft_ratio, self.clock)
        self.limiter = OutageProofLimiter(self.far, share, GatewayMetrics(self.registry))

    def gauge(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"headrace_gateway_{name}")

    async def comes_back(self) -> None:
        self.far.is_reachable = True
        await eventually(lambda: self.gauge("limiter_away") == 0, every_s=0.001)

    async def spent(self, **limits: int) -> int:
        """What the far side has of the month's budget, held money included. Nano-USD."""
        limits = limits or {"month_budget_nano_usd": MONTH_NANO_USD}
        answer = await self.far.fake.Admit(ask("peek", peek=True, **limits), Call(None))
        return answer.states[0].limit - answer.states[0].remaining


def ask(lease: str, cost: int = 0, **fields: int) -> pb.AdmitRequest:
    flags = {name: bool(fields.pop(name, 0)) for name in ("prepaid", "peek", "restore")}
    return pb.AdmitRequest(
        lease_id=lease,
        tenant_id="acme",
        scopes=[pb.Scope(level=pb.LEVEL_KEY, scope_id="k", limits=pb.Limits(**fields))],
        reserve=pb.Amounts(requests=1, cost_nano_usd=cost),
        lease_ms=30_000,
        **flags,
    )


def used(lease: str, cost: int) -> pb.SettleRequest:
    return pb.SettleRequest(
        lease_id=lease, tenant_id="acme", actual=pb.Amounts(requests=1, cost_nano_usd=cost)
    )


@pytest.fixture(autouse=True)
def probes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_gateway.limiter_outage._PROBE_EVERY_S", 0.0)


async def test_rates_go_by_this_gateways_share_and_a_gauge_says_so() -> None:
    """All gateways together grant the limit; the first answer of the real one ends it."""
    rig = Rig(num_replicas=2)
    assert rig.gauge("limiter_away") == 0
    rig.far.is_reachable = False
    answers = [await rig.limiter.admit(ask(f"l{n}", requests_per_minute=12)) for n in range(20)]
    assert [it.outcome for it in answers].count(ADMITTED) == 6
    assert all(it.degraded for it in answers)
    assert rig.gauge("limiter_away") == 1
    await rig.comes_back()
    answer = await rig.limiter.admit(ask("later", requests_per_minute=12))
    assert (answer.outcome, answer.degraded) == (ADMITTED, False)
    await rig.limiter.close()


async def test_prepaid_money_is_refused_and_nothing_is_left_charged() -> None:
    """The call that was lost may have been charged: its lease is given back later."""
    rig = Rig()
    rig.far.num_lost_answers = 1
    refused = await rig.limiter.admit(ask("l", 7, prepaid=1, month_budget_nano_usd=MONTH_NANO_USD))
    assert refused.outcome == pb.AdmitResponse.OUTCOME_UNAVAILABLE
    await rig.comes_back()
    assert rig.far.fake.live_leases() == []
    assert await rig.spent() == 0
    await rig.limiter.close()


async def test_postpaid_keys_spend_a_bounded_allowance() -> None:
    """A share of each budget, by all gateways together, however small each request is."""
    rig = Rig(num_replicas=2, overdraft_ratio=0.1)
    rig.far.is_reachable = False
    limits = {"month_budget_nano_usd": 1000}
    answers = [await rig.limiter.admit(ask(f"l{n}", 20, **limits)) for n in range(5)]
    assert [it.outcome for it in answers] == [ADMITTED, ADMITTED, DENIED, DENIED, DENIED]
    await rig.comes_back()
    await rig.limiter.close()


async def test_an_exhausted_budget_stays_exhausted() -> None:
    """No more is lent than was left when the real one last said so."""
    rig = Rig(overdraft_ratio=0.5)
    limits = {"month_budget_nano_usd": 1000}
    assert (await rig.limiter.admit(ask("a", 990, **limits))).outcome == ADMITTED
    rig.far.is_reachable = False
    assert (await rig.limiter.admit(ask("b", 11, **limits))).outcome == DENIED
    assert (await rig.limiter.admit(ask("c", 10, **limits))).outcome == ADMITTED
    await rig.comes_back()
    await rig.limiter.close()


async def test_what_ends_in_the_outage_is_booked_before_anything_is_decided() -> None:
    """Leases of before and of the outage; the real one decides again by what is really left."""
    rig = Rig()
    limits = {"month_budget_nano_usd": MONTH_NANO_USD}
    await rig.limiter.admit(ask("before", 500, **limits))
    rig.far.is_reachable = False
    await rig.limiter.admit(ask("within", 300, **limits))
    for lease, cost in (("before", 400), ("within", 250)):
        assert (await rig.limiter.settle(used(lease, cost))).settled
    assert rig.gauge("owed_settlements") == 2
    await rig.comes_back()
    assert await rig.spent() == 650
    assert rig.far.fake.live_leases() == []
    assert rig.gauge("owed_settlements") == 0
    await rig.limiter.close()


async def test_a_settlement_that_nobody_waits_for_is_owed_too() -> None:
    """It may be what notices the outage; while there is one, it must be waited for."""
    rig = Rig()
    limits = {"month_budget_nano_usd": MONTH_NANO_USD}
    for lease in "abc":
        await rig.limiter.admit(ask(lease, 500, **limits))
    assert rig.limiter.settle_soon(used("a", 400)) is not None
    await eventually(lambda: len(rig.far.fake.settles) == 1)
    rig.far.is_reachable = False
    assert rig.limiter.settle_soon(used("b", 300)) is not None
    await eventually(lambda: rig.gauge("owed_settlements") == 1)
    assert rig.gauge("limiter_away") == 1
    assert rig.limiter.settle_soon(used("c", 200)) is None
    await rig.limiter.settle(used("c", 200))
    await rig.comes_back()
    assert await rig.spent() == 900
    await rig.limiter.close()


async def test_a_lease_of_the_outage_that_still_runs_is_told_by_its_renewal() -> None:
    """Its slot and its hold are taken there; its settlement then books it once."""
    rig = Rig()
    limits = {"month_budget_nano_usd": MONTH_NANO_USD}
    rig.far.is_reachable = False
    request = ask("l", 300, **limits)
    await rig.limiter.admit(request)
    renew = pb.RenewRequest(tenant_id="acme", lease_ids=["l"], lease_ms=30_000)
    assert (await rig.limiter.renew(renew)).unknown_lease_ids == []
    await rig.comes_back()
    assert (await rig.limiter.renew(renew)).unknown_lease_ids == ["l"]
    await rig.limiter.admit(ask("l", 300, restore=1, **limits))
    assert await rig.spent() == 300
    await rig.limiter.settle(used("l", 200))
    assert await rig.spent() == 200
    await rig.limiter.close()


async def test_what_is_owed_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes, and is counted; the ledger has it."""
    monkeypatch.setattr("headrace_gateway.limiter_outage.MAX_OWED", 2)
    rig = Rig()
    rig.far.is_reachable = False
    for lease in "abc":
        await rig.limiter.settle(used(lease, 1))
    assert rig.gauge("dropped_settlements_total") == 1
    await rig.comes_back()
    assert [it.lease_id for it in rig.far.fake.settles] == ["b", "c"]
    await rig.limiter.close()


async def test_an_objection_is_no_outage() -> None:
    """A request that the limiter will not look at does not pass, whoever pays for it."""
    rig = Rig()
    rig.far.objection = InvalidRequest("scope_id must not have braces")
    with pytest.raises(Internal):
        await rig.limiter.admit(ask("l", requests_per_minute=1))
    with pytest.raises(Internal):
        await rig.limiter.admit(ask("{l}", requests_per_minute=1))
    assert rig.gauge("limiter_away") == 0
    rig.far.objection = Internal()
    assert (await rig.limiter.admit(ask("m", requests_per_minute=1))).degraded
    assert rig.gauge("limiter_away") == 0


ADMIT = st.tuples(st.just("admit"), st.integers(0, 3000))
SETTLE = st.tuples(st.just("settle"), st.integers(0, 3000))
TURN = st.tuples(st.just("turn"), st.integers(1, 8))
LOSE = st.tuples(st.just("lose"), st.sampled_from([0.0, 0.3, 0.6]))
REACH = st.tuples(st.just("reach"), st.booleans())
RENEW = st.tuples(st.just("renew"))
# Often what brings requests forward, or the rare accidents happen to nobody.
STEP = st.one_of(ADMIT, SETTLE, TURN, ADMIT, SETTLE, TURN, LOSE, REACH, RENEW)


@settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(STEP, min_size=60, max_size=200), st.integers(0, 10**6))
def test_money_is_booked_once_whatever_gets_lost(steps: list[tuple[Any, ...]], seed: int) -> None:
    """Calls and answers lost anywhere: at the end no lease is left, and each cost counts once."""

    async def play() -> None:
        player = Player(random.Random(seed))
        for name, *values in steps:
            await getattr(player, name)(*values)
        await player.finish()

    asyncio.run(play())


class Player:
    """Requests of one key, and accidents between them."""

    def __init__(self, chosen: random.Random) -> None:
        self.chosen, self.rig = chosen, Rig(overdraft_ratio=0.01)
        self.rig.far.chosen = chosen
        self.running: dict[str, pb.AdmitRequest] = {}
        self.booked = self.number = 0

    async def admit(self, cost: int) -> None:
        self.number += 1
        request = ask(f"l{self.number}", cost, month_budget_nano_usd=MONTH_NANO_USD)
        if (await self.rig.limiter.admit(request)).outcome == ADMITTED:
            self.running[request.lease_id] = request

    async def settle(self, cost: int) -> None:
        if self.running:
            lease = self.chosen.choice(sorted(self.running))
            await self.rig.limiter.settle(used(lease, cost))
            del self.running[lease]
            self.booked += cost

    async def renew(self) -> None:
        """As `Admission` does."""
        renew = pb.RenewRequest(tenant_id="acme", lease_ids=sorted(self.running), lease_ms=30_000)
        for lease in (await self.rig.limiter.renew(renew)).unknown_lease_ids:
            again = pb.AdmitRequest()
            again.CopyFrom(self.running[lease])
            again.restore = True
            await self.rig.limiter.admit(again)

    async def lose(self, ratio: float) -> None:
        self.rig.far.loss_ratio = ratio

    async def reach(self, is_reachable: bool) -> None:
        self.rig.far.is_reachable = is_reachable

    async def turn(self, num_turns: int) -> None:
        for _ in range(num_turns):
            await asyncio.sleep(0)

    async def finish(self) -> None:
        self.rig.far.loss_ratio = 0.0
        while self.running:
            await self.settle(1)
        if self.rig.gauge("limiter_away"):
            await self.rig.comes_back()
        assert self.rig.far.fake.live_leases() == []
        assert await self.rig.spent() == self.booked
        await self.rig.limiter.close()
