"""Billing's books: what budgets have seen."""

from __future__ import annotations

from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_contracts.billing.v1 import billing_pb2 as pb

_SERVICE = pb.DESCRIPTOR.services_by_name["Ledger"]
_GET_SPEND = method_ref(_SERVICE, "GetSpend", pb.GetSpendRequest, pb.GetSpendResponse)
# Requests wait for much shorter; the answer is of use to the next one all the same.
_TIMEOUT_S = 5.0


class LedgerClient:
    """Calls to billing's ledger."""

    def __init__(self, address: str) -> None:
        self._session = SessionClient(address)

    async def get_spend(self, request: pb.GetSpendRequest) -> pb.GetSpendResponse:
        """Return what budgets have spent and hold.

        Raises:
            HeadraceError: no answer in time.
        """
        return await self._session.unary(_GET_SPEND, request, timeout_s=_TIMEOUT_S)

    async def close(self) -> None:
        """End the connection."""
        await self._session.close()
