"""What is asked of the books."""

from __future__ import annotations

from headrace_billing import spend_store, usage_store, usage_sums, verify
from headrace_billing.key_rules import check_storable
from headrace_billing.store import Database
from headrace_common.errors import InvalidRequest
from headrace_common.rpc import Call
from headrace_contracts.billing.v1 import billing_pb2 as pb

MAX_EVENTS = 10_000


class LedgerService:
    """Servicer of `headrace.billing.v1.Ledger`. Reads only."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def ListUsage(self, request: pb.ListUsageRequest, _call: Call) -> pb.ListUsageResponse:  # noqa: N802 - contract name
        """Usage per request, by request id; the total is over all pages."""
        if not (request.key_id or request.tenant_id or request.request_id):
            raise InvalidRequest("Name a key_id, a tenant_id or a request_id.")
        check_storable(request)
        return await self._database.read(
            lambda it: usage_store.list_usage(it, request), request.tenant_id
        )

    async def FindMissing(  # noqa: N802 - contract name
        self, request: pb.FindMissingRequest, _call: Call
    ) -> pb.FindMissingResponse:
        """Which of these events the books do not have."""
        check_storable(request)
        if len(request.events) > MAX_EVENTS:
            raise InvalidRequest(f"At most {MAX_EVENTS:,} events may be asked for.", param="events")
        missing = await self._database.read(
            lambda it: usage_store.find_missing(it, list(request.events))
        )
        return pb.FindMissingResponse(missing=missing)

    async def GetSpend(self, request: pb.GetSpendRequest, _call: Call) -> pb.GetSpendResponse:  # noqa: N802 - contract name
        """What budgets have seen; admission rebuilds its counters from it."""
        spend_store.check(request)
        spends = await self._database.read(lambda it: spend_store.get_spends(it, request))
        return pb.GetSpendResponse(spends=spends)

    async def SumUsage(self, request: pb.SumUsageRequest, _call: Call) -> pb.SumUsageResponse:  # noqa: N802 - contract name
        """Usage by day, summed by what is asked for."""
        check_storable(request)
        return await self._database.read(
            lambda it: usage_sums.sum_usage(it, request), request.tenant_id
        )

    async def Verify(self, _request: pb.VerifyRequest, _call: Call) -> pb.VerifyResponse:  # noqa: N802 - contract name
        """Recount everything from the events and compare."""
        return await self._database.read(verify.verify)
