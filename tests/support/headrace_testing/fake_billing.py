"""Billing in memory: the three contracts, and what a test needs to set the scene.

The same conformance suite runs against it and against the real service
(tests/contract/test_billing_conformance.py).

    billing = FakeBilling()
    api_key, key = billing.create_key(limits=Limits(requests_per_minute=3))
    async with FakeBillingServer(billing) as server:
        client = SessionClient(server.address)
        ...
        billing.revoke(key.key_id)     # watchers hear of it at once
        billing.book(event)            # as if it had come through Kafka
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from headrace_billing.key_rules import (
    DEFAULT_PROJECT,
    KeyOwner,
    check_changeable,
    check_key,
    check_limits,
    check_tenant,
    check_usable,
    hash_api_key,
    new_api_key,
    new_cache_salt,
    new_key_id,
    prefix_of,
    principal,
)
from headrace_billing.ledger import CLOSED, Booking, Recount, book
from headrace_billing.price_rules import check_price, normalised_price
from headrace_billing.prices import PriceBook
from headrace_billing.spend_store import check as check_spend_request
from headrace_common.clock import Clock, SystemClock
from headrace_common.errors import HeadraceError, InvalidRequest, NotFound, UnknownKey
from headrace_common.ids import first_request_id
from headrace_common.price_rows import PriceRow
from headrace_common.rpc import Call
from headrace_common.rpc_server import RpcServer
from headrace_contracts.billing.v1 import billing_pb2 as pb
from headrace_contracts.ratelimit.v1.ratelimit_pb2 import (
    LEVEL_KEY,
    LEVEL_MODEL,
    LEVEL_PROJECT,
    LEVEL_TENANT,
    Limits,
)
from headrace_contracts.usage.v1.usage_pb2 import PRICE_TIER_STANDARD, UsageEvent
from headrace_testing.fake_books import sum_usage

_CHANGEABLE = (
    "name",
    "allowed_models",
    "limits",
    "guard_policy",
    "guard_blocklist",
    "guard_fail_open",
    "expires_unix_s",
)
SERVICES = tuple(pb.DESCRIPTOR.services_by_name[name] for name in ("Keys", "Admin", "Ledger"))
# Nano-USD per token: input, cached input, cache write, output.
PRICES = (20, 2, 25, 60)


class FakeBilling:
    """Servicer of Keys, Admin and Ledger over plain dicts.

    Args:
        clock: wall time for records and expiry.
        beat_s: pause between two beats of `WatchChanges`.
    """

    def __init__(self, clock: Clock | None = None, beat_s: float = 0.2) -> None:
        self._clock = clock or SystemClock()
        self._beat_s = beat_s
        self._revision = 1
        self._revisions: dict[str, int] = {}
        self._tenants: dict[str, pb.Tenant] = {}
        self._salts: dict[str, bytes] = {}
        # By level, tenant and project or model.
        self._limits: dict[tuple[int, str, str], Limits] = {}
        self._by_hash: dict[bytes, str] = {}
        self._watchers: set[asyncio.Queue[pb.Change]] = set()
        self._bookings: dict[tuple[str, int], Booking] = {}
        self.keys: dict[str, pb.Key] = {}
        self.prices = PriceBook(
            PriceRow(model, PRICE_TIER_STANDARD, 0, 0, *PRICES, version=1)
            for model in ("default", "smollm2-135m-instruct")
        )
        # Set to make every call fail with it, as when the service is down.
        self.failure: HeadraceError | None = None
        # Hashes that were asked for, in order: shows what a cache saved.
        self.resolved: list[bytes] = []

    # What tests call directly.

    def create_key(
        self, tenant_id: str = "acme", *, limits: Limits | None = None, **fields: object
    ) -> tuple[str, pb.Key]:
        """Make a key (and its tenant); *fields* are those of the contract's `Key`."""
        key = pb.Key(tenant_id=tenant_id, limits=limits, **fields)  # type: ignore[arg-type]  # any field
        response = self._create(key)
        return response.api_key, response.key

    def revoke(self, key_id: str) -> None:
        """Revoke a key; watchers hear of it."""
        key = self._key(key_id)
        if not key.revoked_unix_s:
            key.revoked_unix_s = self._now()
            self._changed_key(key_id)

    def replace_secret(self, key_id: str) -> str:
        """Rotate a key without an overlap; watchers hear of it."""
        api_key, key = new_api_key(), self._key(key_id)
        self._by_hash = {
            digest: whose for digest, whose in self._by_hash.items() if whose != key_id
        }
        self._by_hash[hash_api_key(api_key)] = key_id
        key.prefix = prefix_of(api_key)
        self._changed_key(key_id)
        return api_key

    def set_price(self, price: pb.Price) -> None:
        """Add a price; watchers hear of it."""
        check_price(price)
        new = normalised_price(price, self.prices.version + 1)
        row = PriceRow(**_all_fields(new))
        self.prices = PriceBook([*self.prices.rows.all, row])
        self._announce(pb.Change(prices=True))

    def book(self, event: UsageEvent) -> bool:
        """Book an event as if it had come through Kafka; False = it was there already.

        Raises:
            BadEventError: the real ledger would put it among the dead letters.
        """
        booking = book(event, self.prices)
        return self._bookings.setdefault((event.request_id, event.kind), booking) is booking

    # Keys

    async def ResolveKey(self, request: pb.ResolveKeyRequest, _call: Call) -> pb.Principal:  # noqa: N802 - contract name
        """Say whom a key stands for."""
        self._fail()
        self.resolved.append(request.key_sha256)
        key_id = request.key_id or self._by_hash.get(request.key_sha256, "")
        if key_id not in self.keys:
            raise UnknownKey("This API key is not known.")
        key = self.keys[key_id]
        owner = self._owner(key)
        check_usable(key, owner, self._clock.unix_s())
        key.last_used_unix_s = self._now()
        return principal(key, owner, self._revisions[key_id])

    async def WatchChanges(  # noqa: N802 - contract name
        self, _request: pb.WatchChangesRequest, _call: Call
    ) -> AsyncIterator[pb.Change]:
        """A beat at once, changes when they come, beats in between."""
        self._fail()
        queue: asyncio.Queue[pb.Change] = asyncio.Queue()
        self._watchers.add(queue)
        try:
            yield pb.Change(revision=self._revision)
            while True:
                try:
                    async with asyncio.timeout(self._beat_s):
                        yield await queue.get()
                except TimeoutError:
                    self._fail()
                    yield pb.Change(revision=self._revision)
        finally:
            self._watchers.discard(queue)

    async def GetPriceTable(self, _request: pb.GetPriceTableRequest, _call: Call) -> pb.PriceTable:  # noqa: N802 - contract name
        """All prices."""
        self._fail()
        return self.prices.to_proto()

    # Admin

    async def CreateTenant(self, request: pb.CreateTenantRequest, _call: Call) -> pb.Tenant:  # noqa: N802 - contract name
        """Make a tenant, or return the one there is."""
        self._fail()
        check_tenant(request.tenant_id, request.name)
        return self._tenant(request.tenant_id, request.name)

    async def ListTenants(  # noqa: N802 - contract name
        self, _request: pb.ListTenantsRequest, _call: Call
    ) -> pb.ListTenantsResponse:
        """All tenants, by id."""
        self._fail()
        return pb.ListTenantsResponse(tenants=[self._tenants[it] for it in sorted(self._tenants)])

    async def CreateKey(self, request: pb.CreateKeyRequest, _call: Call) -> pb.CreateKeyResponse:  # noqa: N802 - contract name
        """Make a key; the only time it is shown."""
        self._fail()
        return self._create(request.key)

    async def ListKeys(self, request: pb.ListKeysRequest, _call: Call) -> pb.ListKeysResponse:  # noqa: N802 - contract name
        """Keys in the order they were made."""
        self._fail()
        keys = [k for k in self.keys.values() if request.tenant_id in ("", k.tenant_id)]
        return pb.ListKeysResponse(keys=keys)

    async def RevokeKey(self, request: pb.RevokeKeyRequest, _call: Call) -> pb.Key:  # noqa: N802 - contract name
        """End a key."""
        self._fail()
        self.revoke(request.key_id)
        return self.keys[request.key_id]

    async def UpdateKey(self, request: pb.UpdateKeyRequest, _call: Call) -> pb.Key:  # noqa: N802 - contract name
        """Replace the changeable fields of a key."""
        self._fail()
        check_changeable(request.key)
        key = self._key(request.key.key_id)
        self._replace(key, request.key, request.fields or _CHANGEABLE)
        return key

    async def SetPrice(self, request: pb.SetPriceRequest, _call: Call) -> pb.PriceTable:  # noqa: N802 - contract name
        """Add a price."""
        self._fail()
        self.set_price(request.price)
        return self.prices.to_proto()

    async def SetLimits(  # noqa: N802 - contract name
        self, request: pb.SetLimitsRequest, _call: Call
    ) -> pb.SetLimitsResponse:
        """Replace the limits of a key, project, tenant or model."""
        self._fail()
        if request.level == LEVEL_KEY:
            key = self._key(request.scope_id)
            self._replace(key, pb.Key(limits=request.limits), ["limits"])
        else:
            if request.tenant_id not in self._tenants:
                raise NotFound(f"There is no tenant {request.tenant_id!r}.", param="tenant_id")
            self._set_limits(request.level, request.tenant_id, request.scope_id, request.limits)
        return pb.SetLimitsResponse(revision=self._revision)

    # Ledger

    async def SumUsage(self, request: pb.SumUsageRequest, _call: Call) -> pb.SumUsageResponse:  # noqa: N802 - contract name
        """Usage by day."""
        self._fail()
        return sum_usage(self._bookings.values(), request)

    async def ListUsage(self, request: pb.ListUsageRequest, _call: Call) -> pb.ListUsageResponse:  # noqa: N802 - contract name
        """Usage per request, by request id."""
        self._fail()
        if not (request.key_id or request.tenant_id or request.request_id):
            raise InvalidRequest("Name a key_id, a tenant_id or a request_id.")
        found = {rid: b for (rid, kind), b in self._bookings.items() if kind != CLOSED}
        found |= {rid: b for (rid, kind), b in self._bookings.items() if kind == CLOSED}
        matching = {rid: found[rid] for rid in sorted(found) if _matches(found[rid].event, request)}
        page = [rid for rid in matching if rid > request.after_request_id][: request.limit or 1000]
        return pb.ListUsageResponse(
            records=[
                pb.UsageRecord(
                    event=matching[rid].event,
                    amount_nano_usd=matching[rid].amount_nano_usd,
                    closed=matching[rid].entry is not None,
                )
                for rid in page
            ],
            total_nano_usd=sum(it.amount_nano_usd for it in matching.values()),
        )

    async def FindMissing(  # noqa: N802 - contract name
        self, request: pb.FindMissingRequest, _call: Call
    ) -> pb.FindMissingResponse:
        """Which of these are not booked."""
        self._fail()
        if len(request.events) > 10_000:
            raise InvalidRequest("At most 10,000 events may be asked for.", param="events")
        missing = [it for it in request.events if (it.request_id, it.kind) not in self._bookings]
        return pb.FindMissingResponse(missing=missing)

    async def GetSpend(self, request: pb.GetSpendRequest, _call: Call) -> pb.GetSpendResponse:  # noqa: N802 - contract name
        """What budgets have seen."""
        self._fail()
        check_spend_request(request)
        spends = [self._spend(request.tenant_id, query) for query in request.queries]
        return pb.GetSpendResponse(spends=spends)

    def _spend(self, tenant_id: str, query: pb.SpendQuery) -> pb.Spend:
        spend = pb.Spend()
        for (request_id, kind), booking in sorted(self._bookings.items(), reverse=True):
            event = booking.event
            is_of_scope = event.tenant_id == tenant_id and query.scope_id == {
                LEVEL_KEY: event.key_id,
                LEVEL_PROJECT: event.project_id,
                LEVEL_TENANT: tenant_id,
                LEVEL_MODEL: f"{tenant_id}/{event.model}",
            }.get(query.level, "")
            is_in_window = request_id >= first_request_id(query.from_unix_us) and (
                not query.to_unix_us or request_id < first_request_id(query.to_unix_us)
            )
            if not (is_of_scope and is_in_window):
                continue
            spend.spent_nano_usd += booking.amount_nano_usd
            if kind != CLOSED and (request_id, CLOSED) not in self._bookings:
                spend.holds.add(request_id=request_id, hold_nano_usd=event.hold_nano_usd)
        return spend

    async def Verify(self, _request: pb.VerifyRequest, _call: Call) -> pb.VerifyResponse:  # noqa: N802 - contract name
        """Recount; the fake keeps no second copy that could differ."""
        self._fail()
        recount = Recount(self.prices)
        for booking in self._bookings.values():
            recount.add(booking.event)
        return pb.VerifyResponse(
            ok=True,
            num_events=len(self._bookings),
            num_entries=len(recount.entries),
            num_open=len(recount.open_requests),
            postings_sum_nano_usd=sum(recount.balances.values()),
        )

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _now(self) -> int:
        return int(self._clock.unix_s())

    def _tenant(self, tenant_id: str, name: str) -> pb.Tenant:
        if tenant_id not in self._tenants:
            self._tenants[tenant_id] = pb.Tenant(
                tenant_id=tenant_id, name=name or tenant_id, created_unix_s=self._now()
            )
            self._salts[tenant_id] = new_cache_salt()
        return self._tenants[tenant_id]

    def _key(self, key_id: str) -> pb.Key:
        if key_id not in self.keys:
            raise NotFound(f"There is no key {key_id!r}.", param="key_id")
        return self.keys[key_id]

    def _create(self, wanted: pb.Key) -> pb.CreateKeyResponse:
        check_key(wanted)
        self._tenant(wanted.tenant_id, "")
        api_key, key = new_api_key(), pb.Key()
        key.CopyFrom(wanted)
        key.key_id, key.prefix = new_key_id(), prefix_of(api_key)
        key.project_id = wanted.project_id or DEFAULT_PROJECT
        key.created_unix_s, key.revoked_unix_s, key.last_used_unix_s = self._now(), 0, 0
        self.keys[key.key_id] = key
        self._by_hash[hash_api_key(api_key)] = key.key_id
        self._changed_key(key.key_id)
        return pb.CreateKeyResponse(api_key=api_key, key=key)

    def _owner(self, key: pb.Key) -> KeyOwner:
        tenant_id, nothing = key.tenant_id, Limits()
        return KeyOwner(
            self._salts[tenant_id],
            self._limits.get((LEVEL_PROJECT, tenant_id, key.project_id), nothing),
            self._limits.get((LEVEL_TENANT, tenant_id, ""), nothing),
            model_limits=tuple(
                pb.ModelLimits(model=model, limits=limits)
                for (level, owner, model), limits in self._limits.items()
                if (level, owner) == (LEVEL_MODEL, tenant_id) and limits.ListFields()
            ),
        )

    def _set_limits(self, level: int, tenant_id: str, scope_id: str, limits: Limits) -> None:
        projects = {key.project_id for key in self.keys.values() if key.tenant_id == tenant_id}
        if level == LEVEL_PROJECT and scope_id not in {DEFAULT_PROJECT, *projects}:
            raise NotFound(f"There is no project {scope_id!r}.", param="scope_id")
        if level not in (LEVEL_PROJECT, LEVEL_TENANT, LEVEL_MODEL):
            raise InvalidRequest("level must be key, project, tenant or model.", param="level")
        check_limits(limits, "limits")
        self._limits[level, tenant_id, "" if level == LEVEL_TENANT else scope_id] = limits
        for key in self.keys.values():
            if key.tenant_id == tenant_id:
                self._changed_key(key.key_id)

    def _replace(self, key: pb.Key, wanted: pb.Key, fields: Iterable[str]) -> None:
        for name in fields:
            key.ClearField(name)  # type: ignore[arg-type]  # a field's name
            key.MergeFrom(pb.Key(**{name: getattr(wanted, name)}))
        self._changed_key(key.key_id)

    def _changed_key(self, key_id: str) -> None:
        self._revisions[key_id] = self._revision + 1
        self._announce(pb.Change(key_ids=[key_id]))

    def _announce(self, change: pb.Change) -> None:
        self._revision += 1
        change.revision = self._revision
        for watcher in self._watchers:
            watcher.put_nowait(change)


class FakeBillingServer:
    """A fake billing service behind a real `RpcServer` on a free port. An async context manager."""

    def __init__(self, billing: FakeBilling | None = None, address: str = "127.0.0.1:0") -> None:
        self.billing = billing or FakeBilling()
        self._server = RpcServer(address, [(service, self.billing) for service in SERVICES])

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self._server.port}"

    async def __aenter__(self) -> FakeBillingServer:
        await self._server.start()
        await self._server.set_ready(True)
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._server.stop(0)


def _matches(event: UsageEvent, request: pb.ListUsageRequest) -> bool:
    return (
        request.key_id in ("", event.key_id)
        and request.tenant_id in ("", event.tenant_id)
        and request.request_id in ("", event.request_id)
    )


def _all_fields(price: pb.Price) -> dict[str, Any]:
    # Any: field values, by name the same as PriceRow's.
    return {field.name: getattr(price, field.name) for field in pb.Price.DESCRIPTOR.fields}
