"""The rate limiter: admit, settle, renew."""

from __future__ import annotations

from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb

_SERVICE = pb.DESCRIPTOR.services_by_name["RateLimit"]
_ADMIT = method_ref(_SERVICE, "Admit", pb.AdmitRequest, pb.AdmitResponse)
_SETTLE = method_ref(_SERVICE, "Settle", pb.SettleRequest, pb.SettleResponse)
_RENEW = method_ref(_SERVICE, "Renew", pb.RenewRequest, pb.RenewResponse)
# Nobody waits for these two for long; they are repeated.
_BACKGROUND_TIMEOUT_S = 2.0


class RateLimitClient:
    """Calls to the rate limiter. All raise `HeadraceError` when no answer comes in time."""

    def __init__(self, address: str, admit_timeout_s: float) -> None:
        self._session, self._admit_timeout_s = SessionClient(address), admit_timeout_s

    async def admit(self, request: pb.AdmitRequest) -> pb.AdmitResponse:
        """Check and charge all limits at once."""
        return await self._session.unary(_ADMIT, request, timeout_s=self._admit_timeout_s)

    async def settle(self, request: pb.SettleRequest) -> pb.SettleResponse:
        """Replace a reservation by what was used. Idempotent."""
        return await self._session.unary(_SETTLE, request, timeout_s=_BACKGROUND_TIMEOUT_S)

    async def renew(self, request: pb.RenewRequest) -> pb.RenewResponse:
        """Keep leases alive."""
        return await self._session.unary(_RENEW, request, timeout_s=_BACKGROUND_TIMEOUT_S)

    async def close(self) -> None:
        """End the connection."""
        await self._session.close()
