"""The commands' way to billing: plain calls, one channel per command."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from headrace_common import rpc
from headrace_contracts.billing.v1 import billing_pb2 as pb
from headrace_launcher.peer import Req, Res, ask

_ADMIN = pb.DESCRIPTOR.services_by_name["Admin"]
_LEDGER = pb.DESCRIPTOR.services_by_name["Ledger"]
_CREATE_TENANT = rpc.method_ref(_ADMIN, "CreateTenant", pb.CreateTenantRequest, pb.Tenant)
_CREATE_KEY = rpc.method_ref(_ADMIN, "CreateKey", pb.CreateKeyRequest, pb.CreateKeyResponse)
_LIST_KEYS = rpc.method_ref(_ADMIN, "ListKeys", pb.ListKeysRequest, pb.ListKeysResponse)
_REVOKE_KEY = rpc.method_ref(_ADMIN, "RevokeKey", pb.RevokeKeyRequest, pb.Key)
_LIST_USAGE = rpc.method_ref(_LEDGER, "ListUsage", pb.ListUsageRequest, pb.ListUsageResponse)
_VERIFY = rpc.method_ref(_LEDGER, "Verify", pb.VerifyRequest, pb.VerifyResponse)

_TIMEOUT_S = 15.0
# Of calls that go through all events.
_LONG_TIMEOUT_S = 600.0
_LONG = ("Verify", "Replay", "Reconcile")
_PAGE_RECORDS = 1000


class BillingClient:
    """Billing's Admin and Ledger services. Every method raises `PeerError`."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._channel, self._peer = channel, f"billing at {address}"

    async def create_tenant(self, tenant_id: str) -> pb.Tenant:
        """Create a tenant; an existing one is returned."""
        request = pb.CreateTenantRequest(tenant_id=tenant_id, name=tenant_id)
        return await self._call(_CREATE_TENANT, request)

    async def create_key(self, key: pb.Key) -> pb.CreateKeyResponse:
        """Create an API key; only this answer ever holds it."""
        return await self._call(_CREATE_KEY, pb.CreateKeyRequest(key=key))

    async def list_keys(self, tenant_id: str = "") -> list[pb.Key]:
        """List the keys of a tenant, or all."""
        answer = await self._call(_LIST_KEYS, pb.ListKeysRequest(tenant_id=tenant_id))
        return list(answer.keys)

    async def revoke_key(self, key_id: str) -> pb.Key:
        """Revoke a key."""
        return await self._call(_REVOKE_KEY, pb.RevokeKeyRequest(key_id=key_id))

    async def usage(self, key_id: str) -> list[pb.UsageRecord]:
        """Fetch every usage record of a key, page by page, oldest first."""
        records: list[pb.UsageRecord] = []
        after = ""
        while True:
            request = pb.ListUsageRequest(
                key_id=key_id, limit=_PAGE_RECORDS, after_request_id=after
            )
            page = (await self._call(_LIST_USAGE, request)).records
            records.extend(page)
            if len(page) < _PAGE_RECORDS:
                return records
            after = page[-1].event.request_id

    async def send(self, service: str, name: str, request: Message) -> Any:  # Any: its answer
        """Make any call of billing's contracts."""
        method = pb.DESCRIPTOR.services_by_name[service].methods_by_name[name]
        path = f"{method.containing_service.full_name}/{name}"
        reference = rpc.MethodRef(path, type(request), GetMessageClass(method.output_type))
        timeout_s = _LONG_TIMEOUT_S if name in _LONG else _TIMEOUT_S
        return await self._call(reference, request, timeout_s)

    async def call(
        self, service: str, name: str, /, **fields: Any
    ) -> Any:  # Any: fields and answer
        """Make any call of billing's contracts with these fields."""
        method = pb.DESCRIPTOR.services_by_name[service].methods_by_name[name]
        return await self.send(service, name, GetMessageClass(method.input_type)(**fields))

    async def verify(self) -> pb.VerifyResponse:
        """Let billing recount its books."""
        return await self._call(_VERIFY, pb.VerifyRequest(), _LONG_TIMEOUT_S)

    async def _call(
        self, method: rpc.MethodRef[Req, Res], request: Req, timeout_s: float | None = None
    ) -> Res:
        timeout_s = _TIMEOUT_S if timeout_s is None else timeout_s
        return await ask(self._peer, self._channel, method, request, timeout_s)


@asynccontextmanager
async def open_billing(address: str) -> AsyncIterator[BillingClient]:
    """Connect to billing for the length of a block."""
    channel = rpc.open_channel(address)
    try:
        yield BillingClient(channel, address)
    finally:
        await channel.close()
