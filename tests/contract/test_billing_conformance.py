"""The billing contracts, against the real service on both databases and against its fake."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from headrace_billing.bookkeeper import Bookkeeper
from headrace_billing.deliveries import Delivery
from headrace_billing.key_rules import hash_api_key
from headrace_billing.server import BillingServer
from headrace_billing.settings import BillingSettings
from headrace_billing.store import Database
from headrace_common.awake import awake_timeout
from headrace_common.errors import (
    HeadraceError,
    InvalidRequest,
    KeyRevoked,
    NotFound,
    UnknownKey,
)
from headrace_common.ids import first_request_id
from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_contracts.billing.v1 import billing_pb2 as pb
from headrace_contracts.ratelimit.v1.ratelimit_pb2 import (
    LEVEL_KEY,
    LEVEL_MODEL,
    LEVEL_PROJECT,
    LEVEL_TENANT,
    Level,
    Limits,
)
from headrace_contracts.types.v1.types_pb2 import PRIORITY_HIGH, PRIORITY_STANDARD
from headrace_contracts.usage.v1.usage_pb2 import PRICE_TIER_STANDARD, UsageEvent
from headrace_testing.clock import FakeClock
from headrace_testing.fake_billing import SERVICES, FakeBilling, FakeBillingServer
from headrace_testing.usage_events import ADMITTED_UNIX_US, AMOUNT_NANO_USD, MODEL, closed, opened
from headrace_testing.waiting import eventually, free_port

KEYS, ADMIN, LEDGER = SERVICES
RESOLVE = method_ref(KEYS, "ResolveKey", pb.ResolveKeyRequest, pb.Principal)
WATCH = method_ref(KEYS, "WatchChanges", pb.WatchChangesRequest, pb.Change)
PRICE_TABLE = method_ref(KEYS, "GetPriceTable", pb.GetPriceTableRequest, pb.PriceTable)
CREATE_TENANT = method_ref(ADMIN, "CreateTenant", pb.CreateTenantRequest, pb.Tenant)
LIST_TENANTS = method_ref(ADMIN, "ListTenants", pb.ListTenantsRequest, pb.ListTenantsResponse)
CREATE_KEY = method_ref(ADMIN, "CreateKey", pb.CreateKeyRequest, pb.CreateKeyResponse)
LIST_KEYS = method_ref(ADMIN, "ListKeys", pb.ListKeysRequest, pb.ListKeysResponse)
REVOKE = method_ref(ADMIN, "RevokeKey", pb.RevokeKeyRequest, pb.Key)
UPDATE = method_ref(ADMIN, "UpdateKey", pb.UpdateKeyRequest, pb.Key)
SET_PRICE = method_ref(ADMIN, "SetPrice", pb.SetPriceRequest, pb.PriceTable)
LIST_USAGE = method_ref(LEDGER, "ListUsage", pb.ListUsageRequest, pb.ListUsageResponse)
FIND_MISSING = method_ref(LEDGER, "FindMissing", pb.FindMissingRequest, pb.FindMissingResponse)
SET_LIMITS = method_ref(ADMIN, "SetLimits", pb.SetLimitsRequest, pb.SetLimitsResponse)
GET_SPEND = method_ref(LEDGER, "GetSpend", pb.GetSpendRequest, pb.GetSpendResponse)
SUM_USAGE = method_ref(LEDGER, "SumUsage", pb.SumUsageRequest, pb.SumUsageResponse)
VERIFY = method_ref(LEDGER, "Verify", pb.VerifyRequest, pb.VerifyResponse)


@dataclass
class Billing:
    """A service under test, and the way to book an event in it."""

    client: SessionClient
    clock: FakeClock
    book: Callable[[UsageEvent], Awaitable[None]]

    async def create(self, **fields: object) -> pb.CreateKeyResponse:
        key = pb.Key(**{"tenant_id": "acme", **fields})  # type: ignore[arg-type]
        return await self.client.unary(CREATE_KEY, pb.CreateKeyRequest(key=key), timeout_s=5)

    async def resolve(self, api_key: str) -> pb.Principal:
        request = pb.ResolveKeyRequest(key_sha256=hash_api_key(api_key))
        return await self.client.unary(RESOLVE, request, timeout_s=5)

    async def usage(self, **fields: object) -> pb.ListUsageResponse:
        request = pb.ListUsageRequest(**fields)  # type: ignore[arg-type]
        return await self.client.unary(LIST_USAGE, request, timeout_s=5)


@contextlib.asynccontextmanager
async def fake(clock: FakeClock) -> AsyncIterator[Billing]:
    billing = FakeBilling(clock)

    async def book(event: UsageEvent) -> None:
        billing.book(event)

    async with FakeBillingServer(billing) as server:
        client = SessionClient(server.address)
        yield Billing(client, clock, book)
        await client.close()


@contextlib.asynccontextmanager
async def real(clock: FakeClock, url: str) -> AsyncIterator[Billing]:
    settings = BillingSettings(database_url=url, kafka_bootstrap=f"127.0.0.1:{free_port()}")
    server = BillingServer(settings, CollectorRegistry(), clock)
    await server.start()
    books, keeper = Database(url), Bookkeeper("workers")

    async def book(event: UsageEvent) -> None:
        delivery = Delivery("usage", 0, 0, event.SerializeToString())
        await books.write(lambda it: keeper.book_batch(it, [delivery], 1))

    client = SessionClient(f"127.0.0.1:{server.port}")
    await eventually(lambda: server.is_ready, within_s=30)
    yield Billing(client, clock, book)
    await client.close()
    await books.close()
    await server.stop(0)


@pytest.fixture(params=["fake", "sqlite", "postgresql"])
async def billing(
    request: pytest.FixtureRequest, clock: FakeClock, tmp_path: Path
) -> AsyncIterator[Billing]:
    if request.param == "fake":
        running = fake(clock)
    elif request.param == "sqlite":
        running = real(clock, f"sqlite:///{tmp_path}/ledger.db")
    else:
        running = real(clock, request.getfixturevalue("postgres_url"))
    async with running as it:
        yield it


async def test_a_key_says_whom_it_stands_for(billing: Billing) -> None:
    """All that a gateway needs to serve it, and nothing of the key itself."""
    limits = Limits(requests_per_minute=3, total_budget_nano_usd=0)
    made = await billing.create(
        name="ci",
        scopes=["inference"],
        allowed_models=[MODEL],
        limits=limits,
        guard_policy="strict",
        guard_blocklist=["x"],
        guard_fail_open=True,
        expires_unix_s=2_000_000_000,
        priority=PRIORITY_HIGH,
        prepaid=True,
        counts_cached_input=True,
    )
    assert made.api_key.startswith("sk-hr-")
    assert made.api_key.startswith(made.key.prefix)
    found = await billing.resolve(made.api_key)
    assert (found.tenant_id, found.project_id) == ("acme", "default")
    assert found.key_id == made.key.key_id
    assert list(found.scopes) == ["inference"]
    assert list(found.allowed_models) == [MODEL]
    (scope,) = found.limits
    assert (scope.level, scope.scope_id, scope.limits) == (LEVEL_KEY, made.key.key_id, limits)
    assert (found.guard_policy, list(found.guard_blocklist)) == ("strict", ["x"])
    assert found.guard_fail_open
    assert found.prepaid
    assert found.counts_cached_input
    assert found.priority == PRIORITY_HIGH
    assert found.expires_unix_s == 2_000_000_000
    assert len(found.cache_salt) == 16
    assert found.revision > 0


async def test_tenants_do_not_share_a_cache_salt_and_keys_of_one_do(billing: Billing) -> None:
    """The salt isolates the prefix cache by tenant."""
    made = [await billing.create(tenant_id=name) for name in ("acme", "acme", "zeta")]
    one, same, other = [(await billing.resolve(it.api_key)).cache_salt for it in made]
    assert one == same
    assert one != other


async def test_defaults_of_a_bare_key(billing: Billing) -> None:
    """No limits, no scopes, standard priority, never expires."""
    found = await billing.resolve((await billing.create()).api_key)
    assert not found.limits
    assert found.priority == PRIORITY_STANDARD
    assert (found.expires_unix_s, found.prepaid, found.guard_fail_open) == (0, False, False)


async def test_an_unknown_key_is_told_so(billing: Billing) -> None:
    """Not by a lookup of its prefix."""
    made = await billing.create()
    with pytest.raises(UnknownKey) as caught:
        await billing.resolve(made.api_key[:-1])
    assert caught.value.reason == "UNKNOWN_KEY"


async def test_a_revoked_key_stays_revoked(billing: Billing) -> None:
    """Revoking twice changes nothing; updating does not bring it back."""
    made = await billing.create()
    request = pb.RevokeKeyRequest(key_id=made.key.key_id)
    first = await billing.client.unary(REVOKE, request, timeout_s=5)
    assert first.revoked_unix_s == int(billing.clock.unix_s())
    billing.clock.advance(10)
    assert await billing.client.unary(REVOKE, request, timeout_s=5) == first
    await billing.client.unary(UPDATE, pb.UpdateKeyRequest(key=made.key), timeout_s=5)
    with pytest.raises(KeyRevoked):
        await billing.resolve(made.api_key)


async def test_a_key_is_known_by_its_id_too(billing: Billing) -> None:
    """By the same rules as by its secret."""

    async def resolve(key_id: str) -> pb.Principal:
        request = pb.ResolveKeyRequest(key_id=key_id)
        return await billing.client.unary(RESOLVE, request, timeout_s=5)

    made = await billing.create(expires_unix_s=int(billing.clock.unix_s()) + 60)
    assert await resolve(made.key.key_id) == await billing.resolve(made.api_key)
    for unknown in (made.key.key_id + "x", "x\0y", "x" * 200):
        with pytest.raises(UnknownKey) as caught:
            await resolve(unknown)
        assert caught.value.reason == "UNKNOWN_KEY"
    billing.clock.advance(61)
    with pytest.raises(KeyRevoked):
        await resolve(made.key.key_id)


async def test_a_key_expires(billing: Billing) -> None:
    """At its second, by the service's clock."""
    made = await billing.create(expires_unix_s=int(billing.clock.unix_s()) + 60)
    await billing.resolve(made.api_key)
    billing.clock.advance(61)
    with pytest.raises(KeyRevoked):
        await billing.resolve(made.api_key)


async def test_an_update_replaces_what_may_change_and_nothing_else(billing: Billing) -> None:
    """Also what is left empty: it is a replacement, not a merge."""
    made = await billing.create(
        name="old",
        scopes=["inference"],
        allowed_models=["a", "b"],
        limits=Limits(requests_per_minute=3),
        guard_blocklist=["x"],
        prepaid=True,
    )
    change = pb.Key(
        key_id=made.key.key_id,
        tenant_id="thief",
        name="new",
        limits=Limits(max_concurrent=2),
        prefix="sk-other",
        scopes=["admin"],
    )
    updated = await billing.client.unary(UPDATE, pb.UpdateKeyRequest(key=change), timeout_s=5)
    assert (updated.name, updated.tenant_id, updated.prefix) == ("new", "acme", made.key.prefix)
    assert list(updated.scopes) == ["inference"]
    assert updated.prepaid
    found = await billing.resolve(made.api_key)
    assert found.limits[0].limits == Limits(max_concurrent=2)
    assert list(found.allowed_models) == []
    assert list(found.guard_blocklist) == []


async def test_lists_show_tenants_and_keys_and_no_secret(billing: Billing) -> None:
    """By tenant or all."""
    one = await billing.create(name="one")
    other = await billing.create(tenant_id="zeta", project_id="p1", name="two")
    listed = await billing.client.unary(LIST_TENANTS, pb.ListTenantsRequest(), timeout_s=5)
    assert [it.tenant_id for it in listed.tenants] == ["acme", "zeta"]
    everything = await billing.client.unary(LIST_KEYS, pb.ListKeysRequest(), timeout_s=5)
    assert {it.key_id for it in everything.keys} == {one.key.key_id, other.key.key_id}
    some = await billing.client.unary(LIST_KEYS, pb.ListKeysRequest(tenant_id="zeta"), timeout_s=5)
    assert [(it.project_id, it.name) for it in some.keys] == [("p1", "two")]
    assert other.api_key.encode() not in some.SerializeToString()


async def test_creating_a_tenant_twice_returns_the_first(billing: Billing) -> None:
    """Its name and time stay."""
    request = pb.CreateTenantRequest(tenant_id="acme", name="Acme Inc")
    first = await billing.client.unary(CREATE_TENANT, request, timeout_s=5)
    billing.clock.advance(60)
    again = pb.CreateTenantRequest(tenant_id="acme", name="Other")
    assert await billing.client.unary(CREATE_TENANT, again, timeout_s=5) == first
    assert first.name == "Acme Inc"


async def test_mistakes_are_named(billing: Billing) -> None:
    """Wrong ids, unknown keys, questions without a subject."""
    with pytest.raises(InvalidRequest) as caught:
        await billing.create(tenant_id="No Slug")
    assert caught.value.param == "tenant_id"
    for call in (
        billing.client.unary(REVOKE, pb.RevokeKeyRequest(key_id="key_no"), timeout_s=5),
        billing.client.unary(UPDATE, pb.UpdateKeyRequest(key=pb.Key(key_id="no")), timeout_s=5),
    ):
        with pytest.raises(NotFound):
            await call
    with pytest.raises(InvalidRequest):
        await billing.usage()
    price = pb.SetPriceRequest(price=pb.Price(model=""))
    with pytest.raises(InvalidRequest):
        await billing.client.unary(SET_PRICE, price, timeout_s=5)
    many = [pb.EventId(request_id=str(i), kind=UsageEvent.KIND_OPENED) for i in range(10_001)]
    with pytest.raises(InvalidRequest):
        await billing.client.unary(FIND_MISSING, pb.FindMissingRequest(events=many), timeout_s=5)


async def test_watchers_hear_of_changes_at_once_and_of_nothing_every_second(
    billing: Billing,
) -> None:
    """First a beat with where they start; revisions never go back."""
    made = await billing.create()
    async with await billing.client.start(WATCH) as call:
        call.send(pb.WatchChangesRequest())
        call.half_close()
        revision = 0

        async def next_change() -> pb.Change:
            nonlocal revision
            # A gateway takes three seconds without one for billing's absence.
            async with awake_timeout(2.5):
                change = await call.receive()
            assert change is not None
            assert change.revision >= revision
            revision = change.revision
            return change

        async def until_key(key_id: str) -> None:
            while key_id not in (await next_change()).key_ids:
                pass

        await next_change()
        assert revision > 0
        other = await billing.create()
        await until_key(other.key.key_id)
        request = pb.RevokeKeyRequest(key_id=made.key.key_id)
        await billing.client.unary(REVOKE, request, timeout_s=5)
        await until_key(made.key.key_id)
        price = pb.Price(model="m", input_nano_usd=1)
        await billing.client.unary(SET_PRICE, pb.SetPriceRequest(price=price), timeout_s=5)
        while not (await next_change()).prices:
            pass
        beats = [await next_change() for _ in range(2)]
        assert all(it.revision == revision and not it.prices for it in beats)


async def test_a_new_price_is_a_new_version(billing: Billing) -> None:
    """Old rows stay as they were; model 'default' has a price from the start."""
    before = await billing.client.unary(PRICE_TABLE, pb.GetPriceTableRequest(), timeout_s=5)
    assert before.version >= 1
    assert {"default", MODEL} <= {it.model for it in before.prices}
    price = pb.Price(model=MODEL, input_nano_usd=7, effective_from_unix_s=5, version=99)
    after = await billing.client.unary(SET_PRICE, pb.SetPriceRequest(price=price), timeout_s=5)
    assert after.version == before.version + 1
    assert [it for it in after.prices if it.version <= before.version] == list(before.prices)
    (new,) = [it for it in after.prices if it.version == after.version]
    assert (new.input_nano_usd, new.effective_from_unix_s) == (7, 5)
    assert new.tier == PRICE_TIER_STANDARD
    table = await billing.client.unary(PRICE_TABLE, pb.GetPriceTableRequest(), timeout_s=5)
    assert table == after


async def test_usage_shows_requests_with_what_they_cost(billing: Billing) -> None:
    """Open ones with nothing yet; the total is over all that match, not the page."""
    for event in (
        opened("req_1"),
        closed("req_1"),
        opened("req_2"),
        closed("req_3", key_id="key_2"),
        closed("req_4", "zeta", "key_3"),
    ):
        await billing.book(event)
    of_key = await billing.usage(key_id="key_1")
    assert [(it.event.request_id, it.closed) for it in of_key.records] == [
        ("req_1", True),
        ("req_2", False),
    ]
    assert [it.amount_nano_usd for it in of_key.records] == [AMOUNT_NANO_USD, 0]
    assert of_key.records[0].event.usage == closed().usage
    of_tenant = await billing.usage(tenant_id="acme")
    assert [it.event.request_id for it in of_tenant.records] == ["req_1", "req_2", "req_3"]
    assert of_tenant.total_nano_usd == 2 * AMOUNT_NANO_USD
    page = await billing.usage(tenant_id="acme", limit=1, after_request_id="req_2")
    assert [it.event.request_id for it in page.records] == ["req_3"]
    assert page.total_nano_usd == 2 * AMOUNT_NANO_USD
    assert len((await billing.usage(request_id="req_4")).records) == 1
    assert list((await billing.usage(request_id="req_9")).records) == []


async def test_only_what_is_not_booked_is_missing(billing: Billing) -> None:
    """By request and kind."""
    await billing.book(opened("req_1"))
    await billing.book(closed("req_2"))
    asked = [
        pb.EventId(request_id=request_id, kind=kind)
        for request_id in ("req_1", "req_2", "req_3")
        for kind in (UsageEvent.KIND_OPENED, UsageEvent.KIND_CLOSED)
    ]
    found = await billing.client.unary(
        FIND_MISSING, pb.FindMissingRequest(events=asked), timeout_s=5
    )
    assert [(it.request_id, it.kind) for it in found.missing] == [
        ("req_1", UsageEvent.KIND_CLOSED),
        ("req_2", UsageEvent.KIND_OPENED),
        ("req_3", UsageEvent.KIND_OPENED),
        ("req_3", UsageEvent.KIND_CLOSED),
    ]
    nothing = await billing.client.unary(FIND_MISSING, pb.FindMissingRequest(), timeout_s=5)
    assert list(nothing.missing) == []


async def test_spend_is_told_by_scope_and_window(billing: Billing) -> None:
    """Closed requests are spent, open ones held; a request belongs to when it came in."""
    start_us = 1_800_000_000_000_000
    early, late = first_request_id(start_us), first_request_id(start_us + 60_000_000)
    await billing.book(closed(early))
    await billing.book(opened(late))
    await billing.book(closed(first_request_id(start_us + 1_000), key_id="key_2"))
    await billing.book(closed(first_request_id(start_us + 2_000), "other", "key_9"))

    async def spend(level: int, scope_id: str, from_us: int = 0, to_us: int = 0) -> pb.Spend:
        query = pb.SpendQuery(
            level=level, scope_id=scope_id, from_unix_us=from_us, to_unix_us=to_us
        )
        request = pb.GetSpendRequest(tenant_id="acme", queries=[query])
        (found,) = (await billing.client.unary(GET_SPEND, request, timeout_s=5)).spends
        return found

    held = [pb.OpenHold(request_id=late, hold_nano_usd=10_000)]
    amount = AMOUNT_NANO_USD
    assert await spend(LEVEL_KEY, "key_1") == pb.Spend(spent_nano_usd=amount, holds=held)
    for level, scope_id in (
        (LEVEL_TENANT, "acme"),
        (LEVEL_PROJECT, "default"),
        (LEVEL_MODEL, f"acme/{MODEL}"),
    ):
        assert await spend(level, scope_id) == pb.Spend(spent_nano_usd=2 * amount, holds=held)
    before = await spend(LEVEL_TENANT, "acme", 0, start_us + 1_000)
    assert before == pb.Spend(spent_nano_usd=amount)
    after = await spend(LEVEL_TENANT, "acme", start_us + 1_000)
    assert after == pb.Spend(spent_nano_usd=amount, holds=held)
    assert await spend(LEVEL_KEY, "key_3") == pb.Spend()


async def test_a_spend_question_without_a_level_is_refused(billing: Billing) -> None:
    """Nobody is told zero for a question that makes no sense."""
    for request in (
        pb.GetSpendRequest(queries=[pb.SpendQuery(level=LEVEL_KEY)]),
        pb.GetSpendRequest(tenant_id="acme", queries=[pb.SpendQuery(scope_id="key_1")]),
        pb.GetSpendRequest(tenant_id="acme", queries=[pb.SpendQuery(level=LEVEL_KEY)] * 65),
    ):
        with pytest.raises(InvalidRequest):
            await billing.client.unary(GET_SPEND, request, timeout_s=5)


async def test_the_books_verify(billing: Billing) -> None:
    """Each event once, however often it is delivered; postings sum to zero."""
    for event in (closed("req_1"), opened("req_1"), opened("req_2"), closed("req_1")):
        await billing.book(event)
    found = await billing.client.unary(VERIFY, pb.VerifyRequest(), timeout_s=5)
    assert found == pb.VerifyResponse(ok=True, num_events=3, num_entries=1, num_open=1)


async def test_last_used_is_not_known_at_first(billing: Billing) -> None:
    """0 until the key is used."""
    made = await billing.create()
    assert made.key.last_used_unix_s == 0
    assert made.key.created_unix_s == int(billing.clock.unix_s())


async def test_a_hash_of_the_wrong_length_opens_nothing(billing: Billing) -> None:
    """Whatever is sent."""
    for digest in (b"", b"x" * 31, b"x" * 64):
        request = pb.ResolveKeyRequest(key_sha256=digest)
        with pytest.raises(HeadraceError):
            await billing.client.unary(RESOLVE, request, timeout_s=5)


async def test_limits_of_every_level_can_be_set_and_reach_the_key(billing: Billing) -> None:
    """At its next question, and the watchers are told that there is something to ask."""
    made = await billing.create(project_id="p1")
    before = (await billing.resolve(made.api_key)).revision

    async def put(level: Level.ValueType, scope_id: str, number: int) -> int:
        request = pb.SetLimitsRequest(
            level=level,
            tenant_id="acme",
            scope_id=scope_id,
            limits=Limits(max_concurrent=number) if number else Limits(),
        )
        return (await billing.client.unary(SET_LIMITS, request, timeout_s=5)).revision

    assert await put(LEVEL_KEY, made.key.key_id, 1) > before
    await put(LEVEL_PROJECT, "p1", 2)
    await put(LEVEL_TENANT, "", 3)
    last = await put(LEVEL_MODEL, MODEL, 4)
    found = await billing.resolve(made.api_key)
    assert found.revision >= last
    assert [(it.level, it.scope_id, it.limits.max_concurrent) for it in found.limits] == [
        (LEVEL_KEY, made.key.key_id, 1),
        (LEVEL_PROJECT, "p1", 2),
        (LEVEL_TENANT, "acme", 3),
    ]
    assert [(it.model, it.limits.max_concurrent) for it in found.model_limits] == [(MODEL, 4)]
    await put(LEVEL_MODEL, MODEL, 0)
    await put(LEVEL_TENANT, "", 0)
    found = await billing.resolve(made.api_key)
    assert [it.level for it in found.limits] == [LEVEL_KEY, LEVEL_PROJECT]
    assert list(found.model_limits) == []


async def test_limits_of_nothing_are_refused(billing: Billing) -> None:
    """A wrong level, or something that does not exist."""
    await billing.create()
    for level, tenant_id, scope_id, error in (
        (0, "acme", "x", InvalidRequest),
        (LEVEL_KEY, "", "key_no", NotFound),
        (LEVEL_PROJECT, "acme", "nope", NotFound),
        (LEVEL_TENANT, "nope", "", NotFound),
    ):
        request = pb.SetLimitsRequest(level=level, tenant_id=tenant_id, scope_id=scope_id)
        with pytest.raises(error):
            await billing.client.unary(SET_LIMITS, request, timeout_s=5)


DAY_US = 86_400_000_000


async def test_usage_is_summed_by_what_is_asked_for(billing: Billing) -> None:
    """Disjoint classes of tokens; pages; only the tenant's own."""
    for event in (
        closed("req_1"),
        closed("req_2", key_id="key_2"),
        closed("req_3", at_unix_us=ADMITTED_UNIX_US - DAY_US),
        closed("req_4", "zeta"),
    ):
        await billing.book(event)

    async def ask(**fields: object) -> pb.SumUsageResponse:
        request = pb.SumUsageRequest(tenant_id="acme", **fields)  # type: ignore[arg-type]
        return await billing.client.unary(SUM_USAGE, request, timeout_s=5)

    for bounds in ({"from_unix_s": 9, "to_unix_s": 8}, {"from_unix_s": 9, "to_unix_s": 9}):
        with pytest.raises(InvalidRequest, match="before to_unix_s"):
            await ask(**bounds)
    (total,) = (await ask()).sums
    assert (total.num_requests, total.prompt_tokens, total.cached_tokens) == (3, 300, 120)
    assert (total.output_tokens, total.output_nano_usd) == (90, 5400)
    assert (total.input_nano_usd, total.cached_input_nano_usd) == (3600, 240)
    assert (total.key_id, total.day_unix_s) == ("", 0)
    by_key = await ask(group_by=["key", "day"])
    assert [(it.key_id, it.num_requests) for it in by_key.sums] == [
        ("key_1", 1),
        ("key_1", 1),
        ("key_2", 1),
    ]
    assert by_key.sums[0].day_unix_s + 86_400 == by_key.sums[1].day_unix_s
    page = await ask(group_by=["key"], limit=1)
    assert (page.sums[0].key_id, page.has_more) == ("key_1", True)
    page = await ask(group_by=["key"], limit=1, offset=1)
    assert (page.sums[0].key_id, page.has_more) == ("key_2", False)
    (today,) = (await ask(from_unix_s=ADMITTED_UNIX_US // 1_000_000)).sums
    assert today.num_requests == 2
    assert list((await ask(key_id="key_9")).sums) == []
    with pytest.raises(InvalidRequest):
        await ask(group_by=["colour"])
