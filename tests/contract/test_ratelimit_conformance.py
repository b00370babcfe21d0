"""One suite for the real rate limiter and its fake: what the contract promises."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

import pytest

from headrace_common.errors import InvalidRequest
from headrace_common.lifecycle import Lifecycle
from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_gateway.clients.ratelimit import RateLimitClient
from headrace_gateway.limit_states import Standing, limits_of, standing_of
from headrace_ratelimit.server import RateLimitServer
from headrace_ratelimit.settings import RateLimitSettings
from headrace_testing.fake_ratelimit import FakeRateLimitServer
from headrace_testing.waiting import eventually

SERVICE = pb.DESCRIPTOR.services_by_name["RateLimit"]
ADMIT = method_ref(SERVICE, "Admit", pb.AdmitRequest, pb.AdmitResponse)
SETTLE = method_ref(SERVICE, "Settle", pb.SettleRequest, pb.SettleResponse)
RENEW = method_ref(SERVICE, "Renew", pb.RenewRequest, pb.RenewResponse)
ADMITTED = pb.AdmitResponse.OUTCOME_ADMITTED
DENIED = pb.AdmitResponse.OUTCOME_DENIED
TOO_LARGE = pb.AdmitResponse.OUTCOME_TOO_LARGE
TENANTS = itertools.count()


class Unary:
    """The single calls."""

    def __init__(self, address: str) -> None:
        self._session = SessionClient(address)
        self.close = self._session.close

    async def admit(self, request: pb.AdmitRequest) -> pb.AdmitResponse:
        return await self._session.unary(ADMIT, request, timeout_s=10)

    async def settle(self, request: pb.SettleRequest) -> pb.SettleResponse:
        return await self._session.unary(SETTLE, request, timeout_s=10)

    async def renew(self, request: pb.RenewRequest) -> pb.RenewResponse:
        return await self._session.unary(RENEW, request, timeout_s=10)


class Caller:
    """A caller with a tenant of its own."""

    def __init__(self, client: Unary | RateLimitClient) -> None:
        self._client = client
        self.tenant_id = f"conformance-{next(TENANTS)}"
        self._leases = itertools.count()

    def request(
        self, limits: pb.Limits | list[pb.Scope], lease: str = "", **reserve: int
    ) -> pb.AdmitRequest:
        scopes = (
            limits
            if isinstance(limits, list)
            else [pb.Scope(level=pb.LEVEL_KEY, scope_id="key_1", limits=limits)]
        )
        return pb.AdmitRequest(
            lease_id=lease or f"lease-{next(self._leases)}",
            tenant_id=self.tenant_id,
            scopes=scopes,
            reserve=pb.Amounts(**{"requests": 1, **reserve}),
            lease_ms=60_000,
        )

    async def send(self, request: pb.AdmitRequest) -> pb.AdmitResponse:
        return await self._client.admit(request)

    async def admit(
        self, limits: pb.Limits | list[pb.Scope], lease: str = "", **reserve: int
    ) -> pb.AdmitResponse:
        return await self.send(self.request(limits, lease, **reserve))

    async def settle(self, lease: str, **actual: int) -> bool:
        request = pb.SettleRequest(
            lease_id=lease, tenant_id=self.tenant_id, actual=pb.Amounts(**actual)
        )
        return (await self._client.settle(request)).settled

    async def renew(self, *leases: str, lease_ms: int = 60_000) -> list[str]:
        request = pb.RenewRequest(tenant_id=self.tenant_id, lease_ids=leases, lease_ms=lease_ms)
        return list((await self._client.renew(request)).unknown_lease_ids)


@contextlib.asynccontextmanager
async def calling(address: str, way: str) -> AsyncIterator[Caller]:
    client = RateLimitClient(address, 10) if way == "stream" else Unary(address)
    try:
        yield Caller(client)
    finally:
        await client.close()


@pytest.fixture(params=["real unary", "real stream", "fake unary", "fake stream"])
async def caller(request: pytest.FixtureRequest) -> AsyncIterator[Caller]:
    kind, way = request.param.split()
    if kind == "fake":
        async with FakeRateLimitServer() as fake, calling(fake.address, way) as caller:
            yield caller
        return
    settings = RateLimitSettings(
        redis_url=request.getfixturevalue("redis_db_url"), redis_timeout_s=1.0
    )
    server = RateLimitServer(settings, Lifecycle())
    await server.start()
    async with calling(server.address, way) as caller:
        yield caller
    await server.stop()


def state(response: pb.AdmitResponse, dimension: int) -> pb.DimensionState:
    (found,) = [state for state in response.states if state.dimension == dimension]
    return found


async def test_exactly_ten_of_sixty_simultaneous_requests_pass_a_limit_of_ten(
    caller: Caller,
) -> None:
    """A minute's limit is the burst, and no race lets one more through."""
    limits = pb.Limits(requests_per_minute=10)
    answers = await asyncio.gather(*(caller.admit(limits) for _ in range(60)))
    outcomes = [answer.outcome for answer in answers]
    assert (outcomes.count(ADMITTED), outcomes.count(DENIED)) == (10, 50)
    denied = next(answer for answer in answers if answer.outcome == DENIED)
    assert denied.binding_dimension == pb.DIMENSION_REQUESTS_PER_MINUTE
    assert denied.binding_level == pb.LEVEL_KEY
    assert 0 < denied.retry_after_us <= 6_000_000
    assert not denied.degraded


async def test_states_say_what_is_left(caller: Caller) -> None:
    """One of two used: one remains, and half a minute until both are there."""
    answer = await caller.admit(pb.Limits(requests_per_minute=2, max_concurrent=5))
    rate = state(answer, pb.DIMENSION_REQUESTS_PER_MINUTE)
    assert (rate.limit, rate.remaining) == (2, 1)
    assert 29_000_000 < rate.reset_us <= 30_000_000
    assert state(answer, pb.DIMENSION_CONCURRENCY).remaining == 4


async def test_a_brief_answer_says_the_same(caller: Caller) -> None:
    """Whether by numbers or in full: what a gateway makes of it are the states."""
    key = pb.Limits(requests_per_minute=2, max_concurrent=5, total_budget_nano_usd=0)
    tenant = pb.Limits(tokens_per_minute=1000, requests_per_day=9, month_budget_nano_usd=50)
    scopes = [
        pb.Scope(level=pb.LEVEL_KEY, scope_id="key_1", limits=key),
        pb.Scope(level=pb.LEVEL_PROJECT, scope_id="project", limits=pb.Limits()),
        pb.Scope(level=pb.LEVEL_TENANT, scope_id="acme", limits=tenant),
    ]
    request = caller.request(scopes, input_tokens=100, output_tokens=10)
    request.peek = True
    full = await caller.send(request)
    request.brief = True
    brief = await caller.send(request)

    def told(answer: pb.AdmitResponse) -> Standing:
        # The one came a little later.
        return standing_of(limits_of(scopes), answer)._replace(reset_us=())

    assert told(brief) == told(full)
    assert len(told(brief).remaining) == 6


async def test_a_budget_for_one_admits_one_of_eight(caller: Caller) -> None:
    """Money held by a running request is not there for another."""
    limits = pb.Limits(total_budget_nano_usd=100)
    answers = await asyncio.gather(*(caller.admit(limits, cost_nano_usd=60) for _ in range(8)))
    outcomes = [answer.outcome for answer in answers]
    assert (outcomes.count(ADMITTED), outcomes.count(DENIED)) == (1, 7)
    denied = next(answer for answer in answers if answer.outcome == DENIED)
    assert denied.binding_dimension == pb.DIMENSION_TOTAL_BUDGET


# For each limit: what is set, and a request that uses all of it.
LIMITS_FOR_ONE = {
    pb.DIMENSION_REQUESTS_PER_MINUTE: ({"requests_per_minute": 1}, {}),
    pb.DIMENSION_INPUT_TOKENS_PER_MINUTE: ({"input_tokens_per_minute": 5}, {"input_tokens": 5}),
    pb.DIMENSION_OUTPUT_TOKENS_PER_MINUTE: ({"output_tokens_per_minute": 5}, {"output_tokens": 5}),
    pb.DIMENSION_TOKENS_PER_MINUTE: (
        {"tokens_per_minute": 5},
        {"input_tokens": 2, "output_tokens": 3},
    ),
    pb.DIMENSION_REQUESTS_PER_DAY: ({"requests_per_day": 1}, {}),
    pb.DIMENSION_CONCURRENCY: ({"max_concurrent": 1}, {}),
    pb.DIMENSION_DAY_BUDGET: ({"day_budget_nano_usd": 5}, {"cost_nano_usd": 5}),
    pb.DIMENSION_MONTH_BUDGET: ({"month_budget_nano_usd": 5}, {"cost_nano_usd": 5}),
    pb.DIMENSION_TOTAL_BUDGET: ({"total_budget_nano_usd": 5}, {"cost_nano_usd": 5}),
}


@pytest.mark.parametrize("level", [it for it in pb.Level.values() if it])
async def test_every_limit_binds_at_every_level_and_is_named(
    caller: Caller, level: pb.Level.ValueType
) -> None:
    """Whatever else the request is charged to: that is charged once, by the request that passed."""
    assert set(LIMITS_FOR_ONE) == set(pb.Dimension.values()) - {pb.DIMENSION_UNSPECIFIED}
    other = pb.LEVEL_TENANT if level == pb.LEVEL_KEY else pb.LEVEL_KEY
    for number, (dimension, (limits, reserve)) in enumerate(LIMITS_FOR_ONE.items()):
        wide = pb.Limits(requests_per_minute=100, max_concurrent=100)
        scopes = [
            pb.Scope(level=other, scope_id=f"wide-{number}", limits=wide),
            pb.Scope(level=level, scope_id=f"narrow-{number}", limits=pb.Limits(**limits)),
        ]
        assert (await caller.admit(scopes, **reserve)).outcome == ADMITTED
        denied = await caller.admit(scopes, **reserve)
        assert denied.outcome == DENIED, dimension
        assert (denied.binding_level, denied.binding_dimension) == (level, dimension)
        assert [it.remaining for it in denied.states] == [99, 99, 0]


async def test_a_denial_charges_nothing(caller: Caller) -> None:
    """All or nothing, over all dimensions and scopes."""
    limits = pb.Limits(requests_per_minute=2, day_budget_nano_usd=10)
    assert (await caller.admit(limits, cost_nano_usd=11)).outcome == DENIED
    assert (await caller.admit(limits, cost_nano_usd=10)).outcome == ADMITTED
    answer = await caller.admit(limits, cost_nano_usd=0)
    assert answer.outcome == ADMITTED
    assert state(answer, pb.DIMENSION_REQUESTS_PER_MINUTE).remaining == 0


async def test_the_longest_wait_binds(caller: Caller) -> None:
    """Who waits as long as the answer says is admitted: so the longest wait is named."""
    scopes = [
        pb.Scope(level=pb.LEVEL_KEY, scope_id="k", limits=pb.Limits(requests_per_minute=60)),
        pb.Scope(
            level=pb.LEVEL_TENANT, scope_id="t", limits=pb.Limits(output_tokens_per_minute=100)
        ),
    ]
    for _ in range(60):
        assert (await caller.admit(scopes)).outcome == ADMITTED
    assert (await caller.admit([scopes[1]], output_tokens=100)).outcome == ADMITTED
    denied = await caller.admit(scopes, output_tokens=50)
    assert denied.outcome == DENIED
    assert denied.binding_level == pb.LEVEL_TENANT
    assert denied.binding_dimension == pb.DIMENSION_OUTPUT_TOKENS_PER_MINUTE
    assert 25_000_000 < denied.retry_after_us <= 30_000_000


async def test_what_exceeds_a_burst_is_too_large(caller: Caller) -> None:
    """Waiting would never help, so it is not a denial."""
    answer = await caller.admit(
        pb.Limits(input_tokens_per_minute=100, tokens_per_minute=150), input_tokens=101
    )
    assert answer.outcome == TOO_LARGE
    assert answer.binding_dimension == pb.DIMENSION_INPUT_TOKENS_PER_MINUTE
    answer = await caller.admit(
        pb.Limits(input_tokens_per_minute=100, tokens_per_minute=150),
        input_tokens=100,
        output_tokens=51,
    )
    assert answer.binding_dimension == pb.DIMENSION_TOKENS_PER_MINUTE
    assert answer.retry_after_us == 0


async def test_a_used_up_budget_says_that_waiting_does_not_help(caller: Caller) -> None:
    """A total budget has no next window."""
    limits = pb.Limits(total_budget_nano_usd=100)
    await caller.admit(limits, "first", cost_nano_usd=100)
    await caller.settle("first", requests=1, cost_nano_usd=100)
    denied = await caller.admit(limits, cost_nano_usd=1)
    assert (denied.outcome, denied.retry_after_us) == (DENIED, 0)


async def test_a_budget_of_zero_admits_only_what_is_free(caller: Caller) -> None:
    """Absent is no budget, zero is nothing to spend."""
    zero = pb.Limits(month_budget_nano_usd=0)
    assert (await caller.admit(zero, cost_nano_usd=1)).outcome == DENIED
    assert (await caller.admit(zero, cost_nano_usd=0)).outcome == ADMITTED
    assert (await caller.admit(pb.Limits(), cost_nano_usd=10**15)).outcome == ADMITTED


async def test_repeating_an_admitted_lease_charges_once(caller: Caller) -> None:
    """A retry after a lost answer is free."""
    limits = pb.Limits(requests_per_minute=5, max_concurrent=1, day_budget_nano_usd=10)
    answers = [await caller.admit(limits, "same", cost_nano_usd=10) for _ in range(4)]
    assert {answer.outcome for answer in answers} == {ADMITTED}
    assert state(answers[-1], pb.DIMENSION_REQUESTS_PER_MINUTE).remaining == 4
    assert state(answers[-1], pb.DIMENSION_DAY_BUDGET).remaining == 0


async def test_settling_gives_back_what_was_not_used_exactly_once(caller: Caller) -> None:
    """Rates get the difference, the slot is free, the hold becomes what it really cost."""
    limits = pb.Limits(
        requests_per_minute=10,
        output_tokens_per_minute=1000,
        max_concurrent=1,
        day_budget_nano_usd=1000,
    )
    await caller.admit(limits, "a", output_tokens=900, cost_nano_usd=800)
    assert await caller.settle("a", requests=1, output_tokens=100, cost_nano_usd=150)
    assert not await caller.settle("a", requests=1, output_tokens=100, cost_nano_usd=150)
    answer = await caller.admit(limits, "b")
    assert answer.outcome == ADMITTED
    assert 900 <= state(answer, pb.DIMENSION_OUTPUT_TOKENS_PER_MINUTE).remaining <= 999
    assert state(answer, pb.DIMENSION_DAY_BUDGET).remaining == 850
    assert state(answer, pb.DIMENSION_REQUESTS_PER_MINUTE).remaining == 8


async def test_using_more_than_was_reserved_goes_into_debt(caller: Caller) -> None:
    """The next request waits for it, at most a minute beyond a full one."""
    limits = pb.Limits(output_tokens_per_minute=60)
    await caller.admit(limits, "a", output_tokens=10)
    await caller.settle("a", requests=1, output_tokens=90)
    denied = await caller.admit(limits, output_tokens=1)
    assert denied.outcome == DENIED
    assert 29_000_000 < denied.retry_after_us <= 31_000_000


async def test_debt_is_bounded(caller: Caller) -> None:
    """A wildly wrong reservation blocks a key for two minutes, not for years."""
    limits = pb.Limits(output_tokens_per_minute=60)
    await caller.admit(limits, "a", output_tokens=10)
    await caller.settle("a", requests=1, output_tokens=50_000_000)
    denied = await caller.admit(limits, output_tokens=60)
    assert 119_000_000 < denied.retry_after_us <= 120_000_000


async def test_an_expired_lease_frees_its_slot_and_its_hold_by_itself(caller: Caller) -> None:
    """A gateway that died blocks nobody for longer than a lease."""
    limits = pb.Limits(max_concurrent=1, total_budget_nano_usd=100)
    dead = caller.request(limits, "dead", cost_nano_usd=100)
    dead.lease_ms = 300
    assert (await caller.send(dead)).outcome == ADMITTED
    denied = await caller.admit(limits, cost_nano_usd=100)
    assert (denied.outcome, denied.binding_dimension) == (DENIED, pb.DIMENSION_TOTAL_BUDGET)
    assert 0 < denied.retry_after_us <= 1_000_000

    async def admitted() -> bool:
        return (await caller.admit(limits, cost_nano_usd=100)).outcome == ADMITTED

    await eventually(admitted)
    assert not await caller.settle("dead", cost_nano_usd=100)


async def test_a_late_settle_still_books_the_money(caller: Caller) -> None:
    """What was spent was spent, though the lease had expired; once."""
    limits = pb.Limits(total_budget_nano_usd=100)
    late = caller.request(limits, "late", cost_nano_usd=50)
    late.lease_ms = 1
    await caller.send(late)
    await asyncio.sleep(0.01)
    for _ in range(2):
        assert not await caller.settle("late", cost_nano_usd=40)
    answer = await caller.admit(limits, cost_nano_usd=0)
    assert state(answer, pb.DIMENSION_TOTAL_BUDGET).remaining == 60


async def test_renewing_keeps_a_lease_alive_and_names_the_unknown(caller: Caller) -> None:
    """A long stream keeps its slot as long as its gateway lives."""
    limits = pb.Limits(max_concurrent=1)
    running = caller.request(limits, "running")
    running.lease_ms = 500
    await caller.send(running)
    assert await caller.renew("running", "never-seen") == ["never-seen"]
    await asyncio.sleep(0.6)
    assert (await caller.admit(limits)).outcome == DENIED
    assert await caller.settle("running", requests=1)
    assert await caller.renew("running") == ["running"]
    assert (await caller.admit(limits)).outcome == ADMITTED


async def test_requests_per_day_count_down(caller: Caller) -> None:
    """A window counter: the wait is until midnight UTC."""
    limits = pb.Limits(requests_per_day=2)
    for left in (1, 0):
        answer = await caller.admit(limits)
        assert state(answer, pb.DIMENSION_REQUESTS_PER_DAY).remaining == left
    denied = await caller.admit(limits)
    assert denied.binding_dimension == pb.DIMENSION_REQUESTS_PER_DAY
    assert 0 < denied.retry_after_us <= 86_400_000_000


async def test_tenants_do_not_share_limits(caller: Caller) -> None:
    """The same scope id at another tenant is another scope."""
    limits = pb.Limits(requests_per_minute=1)
    request = caller.request(limits)
    assert (await caller.send(request)).outcome == ADMITTED
    request = caller.request(limits)
    request.tenant_id += "-other"
    assert (await caller.send(request)).outcome == ADMITTED


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"lease_id": ""}, "lease_id"),
        ({"tenant_id": "a}b"}, "tenant_id"),
        ({"lease_ms": 0}, "lease_ms"),
        ({"lease_ms": 3_600_001}, "lease_ms"),
        ({"reserve": pb.Amounts(input_tokens=10**9)}, "input_tokens"),
        ({"reserve": pb.Amounts(cost_nano_usd=2**53)}, "cost_nano_usd"),
    ],
)
async def test_refuses_what_cannot_be_counted(
    caller: Caller, change: dict[str, object], param: str
) -> None:
    """Numbers beyond exact arithmetic and broken ids are the caller's mistake, named."""
    request = caller.request(pb.Limits(requests_per_minute=1))
    for name in change:
        request.ClearField(name)
    request.MergeFrom(pb.AdmitRequest(**change))
    with pytest.raises(InvalidRequest) as raised:
        await caller.send(request)
    assert raised.value.param == param


@pytest.mark.parametrize(
    "limits",
    [
        pb.Limits(month_budget_nano_usd=2**53),
        pb.Limits(tokens_per_minute=10**13),
    ],
)
async def test_refuses_limits_that_cannot_be_counted(caller: Caller, limits: pb.Limits) -> None:
    """Limits beyond exact arithmetic are refused, not rounded."""
    with pytest.raises(InvalidRequest):
        await caller.admit(limits)


async def test_the_largest_budget_is_exact(caller: Caller) -> None:
    """9 million USD to the nano-USD."""
    limits = pb.Limits(month_budget_nano_usd=9 * 10**15)
    answer = await caller.admit(limits, "a", cost_nano_usd=9 * 10**15 - 1)
    assert state(answer, pb.DIMENSION_MONTH_BUDGET).remaining == 1
    await caller.settle("a", requests=1, cost_nano_usd=9 * 10**15 - 3)
    answer = await caller.admit(limits, cost_nano_usd=3)
    assert answer.outcome == ADMITTED
    assert state(answer, pb.DIMENSION_MONTH_BUDGET).remaining == 0


async def test_a_look_charges_nothing(caller: Caller) -> None:
    """Answers that were not admitted tell of limits too; it takes no lease."""
    limits = pb.Limits(requests_per_minute=2, max_concurrent=1)
    await caller.admit(limits, "l")
    for _ in range(3):
        request = caller.request(limits)
        request.peek = True
        request.lease_id, request.lease_ms = "", 0
        request.reserve.Clear()
        answer = await caller.send(request)
        assert answer.outcome == ADMITTED
        assert state(answer, pb.DIMENSION_REQUESTS_PER_MINUTE).remaining == 1
        assert state(answer, pb.DIMENSION_CONCURRENCY).remaining == 0


async def test_cached_input_is_given_back_to_the_input_limit_only(caller: Caller) -> None:
    """Where the plan does not count it; all tokens are all tokens."""
    limits = pb.Limits(input_tokens_per_minute=100, tokens_per_minute=200)
    await caller.admit(limits, "l", input_tokens=80, output_tokens=20)
    await caller.settle("l", requests=1, input_tokens=80, cached_input_tokens=60, output_tokens=20)
    answer = await caller.admit(limits, input_tokens=1)
    assert 79 <= state(answer, pb.DIMENSION_INPUT_TOKENS_PER_MINUTE).remaining <= 81
    assert 99 <= state(answer, pb.DIMENSION_TOKENS_PER_MINUTE).remaining <= 103


async def test_a_lost_lease_is_taken_again_and_settled_as_if_it_had_never_been_lost(
    caller: Caller,
) -> None:
    """Slots and money unchecked, rates not twice."""
    limits = pb.Limits(requests_per_minute=5, max_concurrent=1, total_budget_nano_usd=100)
    assert await caller.renew("l") == ["l"]
    request = caller.request(limits, "l", cost_nano_usd=80)
    request.restore = True
    answer = await caller.send(request)
    assert answer.outcome == ADMITTED
    assert state(answer, pb.DIMENSION_REQUESTS_PER_MINUTE).remaining == 5
    assert state(answer, pb.DIMENSION_CONCURRENCY).remaining == 0
    assert state(answer, pb.DIMENSION_TOTAL_BUDGET).remaining == 20
    assert await caller.renew("l") == []
    assert await caller.settle("l", requests=1, cost_nano_usd=30)
    left = await caller.admit(limits)
    assert state(left, pb.DIMENSION_TOTAL_BUDGET).remaining == 70


async def test_calls_of_one_turn_get_their_own_answers(caller: Caller) -> None:
    """Good and bad ones side by side."""
    limits = pb.Limits(requests_per_minute=1000)
    good = [caller.request(limits, f"l{n}") for n in range(20)]
    bad = caller.request(limits)
    bad.lease_ms = 0
    answers = await asyncio.gather(
        *(caller.send(it) for it in [*good[:10], bad, *good[10:]]), return_exceptions=True
    )
    refused = [it for it in answers if isinstance(it, BaseException)]
    assert [type(it) for it in refused] == [InvalidRequest]
    left = sorted(
        state(it, pb.DIMENSION_REQUESTS_PER_MINUTE).remaining
        for it in answers
        if isinstance(it, pb.AdmitResponse)
    )
    assert len(left) == 20
    assert left[0] in range(979, 985)
