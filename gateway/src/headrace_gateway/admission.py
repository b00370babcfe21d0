"""Admission: reserve before the work, settle after it, keep the lease alive between.

What happens while the rate limiter cannot be asked is not seen here: see `limiter_outage`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol

from headrace_common.errors import (
    BudgetExhausted,
    HeadraceError,
    RateLimited,
    RequestTooLargeForLimit,
    Unavailable,
)
from headrace_common.lifecycle import cancel_and_wait
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_gateway.limit_states import Standing, limits_of, standing_of
from headrace_gateway.metrics import GatewayMetrics
from headrace_gateway.principal import Principal
from headrace_gateway.rate_headers import header_pairs, limit_headers
from headrace_gateway.visit import Caller

_log = logging.getLogger(__name__)

# Life of a lease without renewal: so long a dead gateway holds its slots.
LEASE_MS = 30_000
_MAX_LEASES_PER_CALL = 1000
_BUDGETS = (
    pb.DIMENSION_DAY_BUDGET,
    pb.DIMENSION_MONTH_BUDGET,
    pb.DIMENSION_TOTAL_BUDGET,
)
_NAMES = {
    pb.DIMENSION_REQUESTS_PER_MINUTE: "requests per minute",
    pb.DIMENSION_INPUT_TOKENS_PER_MINUTE: "input tokens per minute",
    pb.DIMENSION_OUTPUT_TOKENS_PER_MINUTE: "output tokens per minute",
    pb.DIMENSION_TOKENS_PER_MINUTE: "tokens per minute",
    pb.DIMENSION_REQUESTS_PER_DAY: "requests per day",
    pb.DIMENSION_CONCURRENCY: "concurrent requests",
    pb.DIMENSION_DAY_BUDGET: "budget of the day",
    pb.DIMENSION_MONTH_BUDGET: "budget of the month",
    pb.DIMENSION_TOTAL_BUDGET: "budget",
}
_LEVELS = {
    pb.LEVEL_KEY: "this key",
    pb.LEVEL_PROJECT: "this project",
    pb.LEVEL_TENANT: "this organization",
    pb.LEVEL_MODEL: "this model",
}


# After a failed renewal.
_RENEW_AGAIN_S = 2.0


class RateLimiter(Protocol):
    """What the rate limiter offers here."""

    async def admit(self, request: pb.AdmitRequest) -> pb.AdmitResponse:
        """Check and charge."""
        ...

    async def settle(self, request: pb.SettleRequest) -> pb.SettleResponse:
        """Replace the reservation."""
        ...

    def settle_soon(self, request: pb.SettleRequest) -> asyncio.Future[pb.LimitAnswer] | None:
        """Replace the reservation without waiting; None: it must be waited for, by `settle`."""
        ...

    async def renew(self, request: pb.RenewRequest) -> pb.RenewResponse:
        """Keep leases alive."""
        ...


class Lease:
    """One admitted request. `settle` must be called exactly once, whatever the ending."""

    def __init__(
        self,
        admission: Admission,
        lease_id: str,
        tenant_id: str,
        standing: Standing,
    ) -> None:
        self._admission = admission
        self.lease_id, self.tenant_id = lease_id, tenant_id
        # How the limits stood when it was admitted.
        self.standing = standing

    def settle(self, actual: pb.Amounts) -> Coroutine[None, None, None]:
        """Give back what was not used. Never raises."""
        return self._admission.settle(self, actual)

    def settle_soon(self, actual: pb.Amounts) -> asyncio.Future[Any]:
        """Settle in the background; what is returned is done when that is."""
        return self._admission.settle_soon(self, actual)


class Admission:
    """Reservations of this gateway. Belongs to one event loop."""

    def __init__(self, limiter: RateLimiter, metrics: GatewayMetrics) -> None:
        self._limiter, self._metrics = limiter, metrics
        # What was asked for, by tenant and lease id: enough to tell a limiter that forgot it.
        self._leases: dict[str, dict[str, pb.AdmitRequest]] = {}
        self._releases: set[asyncio.Task[None]] = set()

    async def admit(
        self, principal: Principal, lease_id: str, reserve: pb.Amounts, model: str = ""
    ) -> Lease:
        """Check every limit of the principal and of the model, and charge the reservation.

        Raises:
            RateLimited: a limit binds; `retry_after_s` says for how long.
            BudgetExhausted: the money is used up.
            RequestTooLargeForLimit: the request could never pass.
            Unavailable: limits or money cannot be checked.
        """
        charged = principal.charged(model)
        request = pb.AdmitRequest(
            lease_id=lease_id,
            tenant_id=principal.tenant_id,
            scopes=charged.scopes,
            reserve=reserve,
            lease_ms=LEASE_MS,
            prepaid=principal.prepaid,
            brief=True,
        )
        try:
            answer = await self._limiter.admit(request)
        except asyncio.CancelledError:
            # The charge may have been made already; nobody waits for its return.
            self._release_later(request)
            raise
        standing = standing_of(charged.limits, answer)
        if answer.outcome != pb.AdmitResponse.OUTCOME_ADMITTED:
            raise denial(answer, standing)
        if answer.degraded:
            self._metrics.degraded.labels("ratelimit").inc()
        self._leases.setdefault(principal.tenant_id, {})[lease_id] = request
        return Lease(self, lease_id, principal.tenant_id, standing)

    @contextlib.asynccontextmanager
    async def one_request(self, caller: Caller) -> AsyncIterator[None]:
        """Charge what generates nothing as one request; its answer tells how the limits stand."""
        one = pb.Amounts(requests=1)
        lease = await self.admit(caller.principal, caller.request_id, one)
        caller.exchange.headers += limit_headers(lease.standing)
        try:
            yield
        finally:
            await lease.settle(one)

    async def settle(self, lease: Lease, actual: pb.Amounts) -> None:
        """Settle a lease; see `Lease.settle`."""
        await self._settle(self._taken_back(lease, actual))

    def settle_soon(self, lease: Lease, actual: pb.Amounts) -> asyncio.Future[Any]:
        """Settle a lease in the background; see `Lease.settle_soon`."""
        request = self._taken_back(lease, actual)
        # A task of its own costs more than all the rest of it.
        return self._limiter.settle_soon(request) or asyncio.create_task(self._settle(request))

    def _taken_back(self, lease: Lease, actual: pb.Amounts) -> pb.SettleRequest:
        leases = self._leases.get(lease.tenant_id)
        if leases is not None:
            leases.pop(lease.lease_id, None)
            if not leases:
                del self._leases[lease.tenant_id]
        return pb.SettleRequest(lease_id=lease.lease_id, tenant_id=lease.tenant_id, actual=actual)

    async def standing(self, principal: Principal) -> Standing:
        """Return how the principal's limits stand, charging nothing; nothing if nobody can tell."""
        if not principal.limits:
            return Standing()
        request = pb.AdmitRequest(tenant_id=principal.tenant_id, scopes=principal.limits, peek=True)
        try:
            answer = await self._limiter.admit(request)
        except HeadraceError as error:
            _log.info("limits cannot be told: %s", error)
            return Standing()
        return standing_of(limits_of(principal.limits), answer)

    async def renew_all(self) -> None:
        """Renew every lease each third of its life; run under `supervise`."""
        delay_s = LEASE_MS / 3000
        while True:
            await asyncio.sleep(delay_s)
            try:
                await self.renew_now()
            except HeadraceError as error:
                # Again while the leases still live.
                _log.info("leases cannot be renewed: %s", error)
                delay_s = min(_RENEW_AGAIN_S, LEASE_MS / 3000)
            else:
                delay_s = LEASE_MS / 3000

    async def renew_now(self) -> None:
        """Renew every lease; what the limiter has lost is told to it again.

        Raises:
            HeadraceError: the limiter does not answer.
        """
        for tenant_id, leases in list(self._leases.items()):
            ids = sorted(leases)
            for start in range(0, len(ids), _MAX_LEASES_PER_CALL):
                answer = await self._limiter.renew(
                    pb.RenewRequest(
                        tenant_id=tenant_id,
                        lease_ids=ids[start : start + _MAX_LEASES_PER_CALL],
                        lease_ms=LEASE_MS,
                    )
                )
                for lease_id in answer.unknown_lease_ids:
                    await self._restore(leases.get(lease_id))

    async def _restore(self, request: pb.AdmitRequest | None) -> None:
        if request is None:
            return
        again = pb.AdmitRequest()
        again.CopyFrom(request)
        again.restore = True
        await self._limiter.admit(again)
        if request.lease_id not in self._leases.get(request.tenant_id, {}):
            # It was settled meanwhile, maybe before it was restored.
            self._release_later(request)

    def _release_later(self, request: pb.AdmitRequest) -> None:
        settle = pb.SettleRequest(lease_id=request.lease_id, tenant_id=request.tenant_id)
        task = asyncio.create_task(self._settle(settle))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def close(self) -> None:
        """Wait for what is still being given back, briefly."""
        if self._releases:
            await asyncio.wait(self._releases, timeout=1.0)
        await cancel_and_wait(*self._releases)

    async def _settle(self, request: pb.SettleRequest) -> None:
        try:
            await self._limiter.settle(request)
        except HeadraceError as error:
            # The lease expires by itself; its reservation then stands as charged.
            _log.warning("lease %s could not be settled: %s", request.lease_id, error)


def _rounded(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 10 else f"{math.ceil(seconds)}"


def denial(answer: pb.AdmitResponse, standing: Standing) -> HeadraceError:
    """Translate a denial into the error for the caller, with the state of the limits."""
    name = _NAMES.get(answer.binding_dimension, "requests")
    level = _LEVELS.get(answer.binding_level, "this key")
    error: HeadraceError
    if answer.outcome == pb.AdmitResponse.OUTCOME_UNAVAILABLE:
        error = Unavailable("Limits cannot be checked now.", retry_after_s=1.0)
    elif answer.binding_dimension in _BUDGETS:
        error = BudgetExhausted(
            f"The {name} of {level} does not cover this request. Check your plan and billing."
        )
    elif answer.outcome == pb.AdmitResponse.OUTCOME_TOO_LARGE:
        error = RequestTooLargeForLimit(
            f"This request alone exceeds the limit of {name} of {level}. "
            "Shorten the prompt or set a smaller max_tokens."
        )
    else:
        # Nobody knows when a running request ends; a second is a fair guess.
        retry_after_s = answer.retry_after_us / 1e6 or 1.0
        error = RateLimited(
            f"The limit of {name} of {level} is reached. Try again in {_rounded(retry_after_s)} s.",
            retry_after_s=retry_after_s,
        )
    error.metadata.update(dict(header_pairs(standing)))
    return error
