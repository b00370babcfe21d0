"""What operators and the launcher ask: tenants, keys, prices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection

from headrace_billing import key_store, price_store, tenant_store
from headrace_billing.audit import Stamp
from headrace_billing.changes import ChangeFeed
from headrace_billing.prices import table_to_proto
from headrace_billing.revisions import current_revision
from headrace_billing.store import Database
from headrace_common.clock import Clock
from headrace_common.rpc import Call
from headrace_contracts.billing.v1 import billing_pb2 as pb
from headrace_contracts.ratelimit.v1.ratelimit_pb2 import LEVEL_KEY

T = TypeVar("T")


class AdminService:
    """Servicer of `headrace.billing.v1.Admin`. Changes are audited and told at once."""

    def __init__(self, database: Database, feed: ChangeFeed, clock: Clock) -> None:
        self._database = database
        self._feed = feed
        self._clock = clock

    async def CreateTenant(self, request: pb.CreateTenantRequest, _call: Call) -> pb.Tenant:  # noqa: N802 - contract name
        """Make a tenant with its cache salt, or return the one there is."""
        return await self._change(
            lambda it, by: tenant_store.ensure_tenant(it, request.tenant_id, request.name, by)
        )

    async def ListTenants(  # noqa: N802 - contract name
        self, _request: pb.ListTenantsRequest, _call: Call
    ) -> pb.ListTenantsResponse:
        """All tenants, by id."""
        return pb.ListTenantsResponse(tenants=await self._database.read(tenant_store.list_tenants))

    async def CreateKey(self, request: pb.CreateKeyRequest, _call: Call) -> pb.CreateKeyResponse:  # noqa: N802 - contract name
        """Make a key; this answer is the only place where it is shown."""
        return await self._change(lambda it, by: key_store.create_key(it, request.key, by))

    async def ListKeys(self, request: pb.ListKeysRequest, _call: Call) -> pb.ListKeysResponse:  # noqa: N802 - contract name
        """Keys by time of creation."""
        keys = await self._database.read(lambda it: key_store.list_keys(it, request.tenant_id))
        return pb.ListKeysResponse(keys=keys)

    async def RevokeKey(self, request: pb.RevokeKeyRequest, _call: Call) -> pb.Key:  # noqa: N802 - contract name
        """End a key for ever."""
        return await self._change(lambda it, by: key_store.revoke_key(it, request.key_id, by))

    async def UpdateKey(self, request: pb.UpdateKeyRequest, _call: Call) -> pb.Key:  # noqa: N802 - contract name
        """Replace the changeable fields of a key."""
        return await self._change(
            lambda it, by: key_store.update_key(it, request.key, by, request.fields)
        )

    async def SetPrice(self, request: pb.SetPriceRequest, _call: Call) -> pb.PriceTable:  # noqa: N802 - contract name
        """Add a price under a new version of the table."""

        def add(connection: Connection, by: Stamp) -> pb.PriceTable:
            price_store.add_price(connection, request.price, by)
            return table_to_proto(price_store.load_price_book(connection))

        return await self._change(add)

    async def SetLimits(  # noqa: N802 - contract name
        self, request: pb.SetLimitsRequest, _call: Call
    ) -> pb.SetLimitsResponse:
        """Replace the limits of a key, project, tenant or model."""

        def put(connection: Connection, by: Stamp) -> pb.SetLimitsResponse:
            if request.level == LEVEL_KEY:
                key_store.set_key_limits(connection, request.scope_id, request.limits, by)
            else:
                tenant_store.set_owner_limits(
                    connection,
                    request.level,
                    request.tenant_id,
                    request.scope_id,
                    request.limits,
                    by,
                )
            return pb.SetLimitsResponse(revision=current_revision(connection))

        return await self._change(put)

    async def _change(self, work: Callable[[Connection, Stamp], T]) -> T:
        by = Stamp(int(self._clock.unix_s()))
        result = await self._database.write(lambda it: work(it, by))
        self._feed.nudge()
        return result
