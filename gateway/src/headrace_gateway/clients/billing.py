"""Billing: who a key is, what changed, what things cost."""

from __future__ import annotations

from collections.abc import AsyncIterator

from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_contracts.billing.v1 import billing_pb2 as pb

_SERVICE = pb.DESCRIPTOR.services_by_name["Keys"]
_RESOLVE = method_ref(_SERVICE, "ResolveKey", pb.ResolveKeyRequest, pb.Principal)
_WATCH = method_ref(_SERVICE, "WatchChanges", pb.WatchChangesRequest, pb.Change)
_PRICES = method_ref(_SERVICE, "GetPriceTable", pb.GetPriceTableRequest, pb.PriceTable)
_LEDGER = pb.DESCRIPTOR.services_by_name["Ledger"]
_SUM_USAGE = method_ref(_LEDGER, "SumUsage", pb.SumUsageRequest, pb.SumUsageResponse)
_LIST_USAGE = method_ref(_LEDGER, "ListUsage", pb.ListUsageRequest, pb.ListUsageResponse)
_TIMEOUT_S = 2.0
# What is cached serves better than a frozen ledger.
_PATIENCE_S = 0.3
_USAGE_TIMEOUT_S = 10.0


class BillingClient:
    """Calls to billing."""

    def __init__(self, address: str) -> None:
        self._session = SessionClient(address, _PATIENCE_S)

    @property
    def is_away(self) -> bool:
        """Whether nobody listened there at the last try: it may be starting again."""
        return self._session.is_away

    async def resolve_key(self, key: bytes | str) -> pb.Principal:
        """Return the owner of a key: the SHA-256 of its secret, or its id.

        Raises:
            UnknownKey: no such key, or revoked.
            HeadraceError: no answer in time.
        """
        request = pb.ResolveKeyRequest()
        if isinstance(key, str):
            request.key_id = key
        else:
            request.key_sha256 = key
        return await self._session.unary(_RESOLVE, request, timeout_s=_TIMEOUT_S)

    async def watch_changes(self) -> AsyncIterator[pb.Change]:
        """Yield every change from now on, and beats."""
        async for change in self._session.stream(_WATCH, pb.WatchChangesRequest()):
            yield change

    async def fetch_prices(self) -> pb.PriceTable:
        """Return all prices."""
        return await self._session.unary(_PRICES, pb.GetPriceTableRequest(), timeout_s=_TIMEOUT_S)

    async def sum_usage(self, request: pb.SumUsageRequest) -> pb.SumUsageResponse:
        """Return usage by day."""
        return await self._session.unary(_SUM_USAGE, request, timeout_s=_USAGE_TIMEOUT_S)

    async def list_usage(self, request: pb.ListUsageRequest) -> pb.ListUsageResponse:
        """Return usage by request."""
        return await self._session.unary(_LIST_USAGE, request, timeout_s=_TIMEOUT_S)

    async def close(self) -> None:
        """End the connection."""
        await self._session.close()
