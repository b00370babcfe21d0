"""A rate limiter that always answers: the real one, or this gateway's own share while it is away.

::

              no answer in time, connection broken
        up ------------------------------------------> away: `LocalShare` decides, at once
         ^                                               |
         '---- it answers, and was told what is owed ----'   asked ten times a second

As there with Redis away, rates go by limit / replicas, prepaid money is refused and postpaid keys
get a bounded allowance: docs/adr/0027. What ends meanwhile is *owed*: told to the real one before
it decides again. A lease granted here is unknown there, so it is told whole (`restore`) by its next
renewal or right before its settlement, whichever comes first; its money is booked once, its rates
stay this gateway's own affair.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from headrace_common.errors import (
    ClientGone,
    Deadline,
    HeadraceError,
    Internal,
    InvalidRequest,
    Unavailable,
)
from headrace_common.lifecycle import cancel_and_wait
from headrace_common.limits.limiter import Mode
from headrace_common.limits.local_share import LocalShare
from headrace_common.limits.plans import Plans, amounts_of
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_gateway.admission import RateLimiter
from headrace_gateway.metrics import GatewayMetrics

_log = logging.getLogger(__name__)

T = TypeVar("T")

_PROBE_EVERY_S = 0.1
# A peek at nobody's limits: answered by whatever answers at all.
_PROBE = pb.AdmitRequest(tenant_id="gateway-probe", peek=True)
# Settlements that wait for the limiter; above that the oldest go, and the ledger has them still.
MAX_OWED = 100_000
_OWED_AT_ONCE = 256
# The far side cannot be asked, as opposed to: it was asked and objects.
_AWAY = (Unavailable, Deadline, ClientGone)


@dataclass
class _Owed:
    """A settlement that the limiter has not confirmed."""

    settle: pb.SettleRequest
    # The lease as it was granted here; None = the limiter knows of it, or need not.
    untold: pb.AdmitRequest | None


class OutageProofLimiter:
    """The rate limiter's three calls, which never fail because it is away. Of one event loop.

    Args:
        limiter: the real one.
        local: this gateway's share.
        metrics: the gauge says whether the limiter is away.
    """

    def __init__(self, limiter: RateLimiter, local: LocalShare, metrics: GatewayMetrics) -> None:
        self._limiter, self._local, self._metrics = limiter, local, metrics
        self._plans = Plans()
        self._is_up = True
        # Granted here and not told yet, by tenant and lease id.
        self._untold: dict[tuple[str, str], pb.AdmitRequest] = {}
        self._owed: deque[_Owed] = deque()
        self._probing: asyncio.Task[None] | None = None

    async def admit(self, request: pb.AdmitRequest) -> pb.AdmitResponse:
        """Decide; `degraded` says that it was decided here.

        Raises:
            Internal: the limiter objects to what it was sent.
        """
        charges = _checked(self._plans.charges, request)
        if not self._is_up:
            return self._decide_here(request)
        try:
            answer = await self._limiter.admit(request)
        except InvalidRequest as error:
            _log.exception("the rate limiter refuses to look at a request")
            raise Internal from error
        except HeadraceError as error:
            self._note_failure(error)
            answer = self._decide_here(request)
            is_charge = not (request.peek or request.restore)
            if is_charge and answer.outcome != pb.AdmitResponse.OUTCOME_ADMITTED:
                # It may have been charged all the same, and nobody will run it.
                self._owe(_Owed(_nothing_used(request), None))
            return answer
        if request.restore:
            self._told(request)
        elif not (request.peek or answer.degraded):
            left = answer.remaining or [it.remaining for it in answer.states]
            self._local.note(request.tenant_id, charges, left)
        return answer

    async def settle(self, request: pb.SettleRequest) -> pb.SettleResponse:
        """End a lease, now or once the limiter is back.

        Raises:
            HeadraceError: the limiter objects.
        """
        self._local.settle(request.tenant_id, request.lease_id, amounts_of(request.actual))
        owed = _Owed(request, self._untold.pop((request.tenant_id, request.lease_id), None))
        if self._is_up:
            try:
                return await self._pay(owed)
            except _AWAY as error:
                self._note_failure(error)
        self._owe(owed)
        return pb.SettleResponse(settled=True)

    def settle_soon(self, request: pb.SettleRequest) -> asyncio.Future[pb.LimitAnswer] | None:
        """End a lease as `settle` does, without waiting, if the limiter is there and knows it.

        None: it is not so, and nothing was done.
        """
        tenant_id, lease_id = request.tenant_id, request.lease_id
        if not self._is_up or (tenant_id, lease_id) in self._untold:
            return None
        answer = self._limiter.settle_soon(request)
        if answer is not None:
            if self._local.owns(tenant_id, lease_id):
                self._local.settle(tenant_id, lease_id, amounts_of(request.actual))
            answer.add_done_callback(partial(self._note_settled, request))
        return answer

    async def renew(self, request: pb.RenewRequest) -> pb.RenewResponse:
        """Keep leases alive, here too. While nobody can tell, none is unknown."""
        self._local.renew(request.tenant_id, list(request.lease_ids), request.lease_ms * 1000)
        if self._is_up:
            try:
                return await self._limiter.renew(request)
            except _AWAY as error:
                self._note_failure(error)
        return pb.RenewResponse()

    async def close(self) -> None:
        """Stop asking for the limiter. What is owed stays owed; the ledger has it."""
        await cancel_and_wait(self._probing)
        if self._owed:
            _log.warning("%d settlements never reached the rate limiter", len(self._owed))

    def _decide_here(self, request: pb.AdmitRequest) -> pb.AdmitResponse:
        plan = _checked(self._plans.of, request)
        answer = self._local.admit(plan)
        is_admitted = answer.outcome == pb.AdmitResponse.OUTCOME_ADMITTED
        if is_admitted and plan.mode is not Mode.PEEK:
            self._untold[plan.tenant_id, plan.lease_id] = request
        return answer

    def _told(self, request: pb.AdmitRequest) -> None:
        self._untold.pop((request.tenant_id, request.lease_id), None)
        self._local.forget(request.tenant_id, request.lease_id)

    def _owe(self, owed: _Owed) -> None:
        if len(self._owed) >= MAX_OWED:
            self._owed.popleft()
            self._metrics.dropped_settlements.inc()
        self._owed.append(owed)
        self._metrics.owed_settlements.set(len(self._owed))

    async def _pay(self, owed: _Owed) -> pb.SettleResponse:
        if owed.untold is not None:
            again = pb.AdmitRequest()
            again.CopyFrom(owed.untold)
            again.restore = True
            await self._limiter.admit(again)
            # From here on the lease is known there: told twice it would be booked twice.
            owed.untold = None
        return await self._limiter.settle(owed.settle)

    async def _pay_all(self) -> None:
        """Tell what is owed.

        Raises:
            HeadraceError: the limiter is away again; what it has not confirmed is still owed.
        """
        while self._owed:
            some = [self._owed.popleft() for _ in range(min(_OWED_AT_ONCE, len(self._owed)))]
            results = await asyncio.gather(*map(self._pay, some), return_exceptions=True)
            failures = [it for it in results if isinstance(it, _AWAY)]
            for owed, result in zip(some, results, strict=True):
                if isinstance(result, _AWAY):
                    self._owe(owed)
                elif isinstance(result, BaseException):
                    _log.warning("settling %s: %s", owed.settle.lease_id, result)
            self._metrics.owed_settlements.set(len(self._owed))
            if failures:
                raise failures[0]

    def _note_settled(
        self, request: pb.SettleRequest, answer: asyncio.Future[pb.LimitAnswer]
    ) -> None:
        error = None if answer.cancelled() else answer.exception()
        if isinstance(error, _AWAY):
            self._note_failure(error)
            self._owe(_Owed(request, None))
        elif error is not None:
            # The lease expires by itself; its reservation then stands as charged.
            _log.warning("lease %s could not be settled: %s", request.lease_id, error)

    def _note_failure(self, error: HeadraceError) -> None:
        """Go by the local share from here on, unless it was a single answer that failed."""
        if not isinstance(error, _AWAY):
            _log.warning("the rate limiter failed: %s", error)
            return
        if not self._is_up:
            return
        self._is_up = False
        self._metrics.limiter_away.set(1)
        _log.warning("the rate limiter is away, this gateway's share decides: %s", error)
        self._probing = asyncio.create_task(self._probe())

    async def _probe(self) -> None:
        while True:
            try:
                await self._limiter.admit(_PROBE)
                await self._pay_all()
            except HeadraceError as error:
                _log.debug("the rate limiter is still away: %s", error)
                await asyncio.sleep(_PROBE_EVERY_S)
            else:
                break
        self._is_up = True
        self._metrics.limiter_away.set(0)
        _log.warning("the rate limiter answers again")


def _checked(check: Callable[[pb.AdmitRequest], T], request: pb.AdmitRequest) -> T:
    try:
        return check(request)
    except InvalidRequest as error:
        _log.exception("a request cannot be put to the rate limiter")
        raise Internal from error


def _nothing_used(request: pb.AdmitRequest) -> pb.SettleRequest:
    return pb.SettleRequest(lease_id=request.lease_id, tenant_id=request.tenant_id)
