"""What operators and the launcher ask: tenants, keys, prices."""

from __future__ import annotations

from sqlalchemy import Connection

from headrace_billing import key_store, price_store, tenant_store
from headrace_billing.audit import Stamp
from headrace_billing.desk import Desk
from headrace_billing.key_rules import check_storable
from headrace_billing.policy_names import PolicyNames
from headrace_billing.revisions import current_revision
from headrace_common.rpc import Call
from headrace_contracts.billing.v1 import billing_pb2 as pb
from headrace_contracts.ratelimit.v1.ratelimit_pb2 import LEVEL_KEY


class AdminService:
    """Servicer of `headrace.billing.v1.Admin`. Changes are audited and told at once."""

    def __init__(self, desk: Desk, policies: PolicyNames) -> None:
        self._desk = desk
        self._policies = policies

    async def CreateTenant(self, request: pb.CreateTenantRequest, call: Call) -> pb.Tenant:  # noqa: N802 - contract name
        """Make a tenant with its cache salt, or return the one there is."""
        return await self._desk.change(
            call,
            request,
            pb.Tenant,
            lambda it, by: tenant_store.ensure_tenant(it, request.tenant_id, request.name, by),
        )

    async def ListTenants(  # noqa: N802 - contract name
        self, _request: pb.ListTenantsRequest, _call: Call
    ) -> pb.ListTenantsResponse:
        """All tenants, by id."""
        return pb.ListTenantsResponse(tenants=await self._desk.read(tenant_store.list_tenants))

    async def CreateKey(self, request: pb.CreateKeyRequest, call: Call) -> pb.CreateKeyResponse:  # noqa: N802 - contract name
        """Make a key; this answer is the only place where it is shown."""
        await self._policies.check(request.key.guard_policy)
        return await self._desk.change(
            call,
            request,
            pb.CreateKeyResponse,
            lambda it, by: key_store.create_key(it, request.key, by),
        )

    async def ListKeys(self, request: pb.ListKeysRequest, _call: Call) -> pb.ListKeysResponse:  # noqa: N802 - contract name
        """Keys by time of creation."""
        check_storable(request)
        keys = await self._desk.read(lambda it: key_store.list_keys(it, request.tenant_id))
        return pb.ListKeysResponse(keys=keys)

    async def RevokeKey(self, request: pb.RevokeKeyRequest, call: Call) -> pb.Key:  # noqa: N802 - contract name
        """End a key for ever."""
        return await self._desk.change(
            call, request, pb.Key, lambda it, by: key_store.revoke_key(it, request.key_id, by)
        )

    async def UpdateKey(self, request: pb.UpdateKeyRequest, call: Call) -> pb.Key:  # noqa: N802 - contract name
        """Replace the changeable fields of a key."""
        await self._policies.check(request.key.guard_policy)
        return await self._desk.change(
            call,
            request,
            pb.Key,
            lambda it, by: key_store.update_key(it, request.key, by, request.fields),
        )

    async def SetPrice(self, request: pb.SetPriceRequest, call: Call) -> pb.PriceTable:  # noqa: N802 - contract name
        """Add a price under a new version of the table."""

        def add(connection: Connection, by: Stamp) -> pb.PriceTable:
            price_store.add_price(connection, request.price, by)
            return price_store.load_price_book(connection).to_proto()

        return await self._desk.change(call, request, pb.PriceTable, add)

    async def SetLimits(  # noqa: N802 - contract name
        self, request: pb.SetLimitsRequest, call: Call
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

        return await self._desk.change(call, request, pb.SetLimitsResponse, put)
