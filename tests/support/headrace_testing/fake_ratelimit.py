"""Admission in memory, for tests of callers: the whole contract, a clock and switches.

The decisions are the limiter's own arithmetic (`headrace_common.limits.limiter`), without Redis,
pipelines or breakers. The same conformance suite runs against it and against the real service
(tests/contract/test_ratelimit_conformance.py).

    fake = FakeRateLimit()
    async with FakeRateLimitServer(fake) as server:
        client = SessionClient(server.address)
        ...
        fake.degraded = True              # answers as without Redis
        assert fake.live_leases() == []   # everything was settled
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from headrace_common.clock import Clock, SystemClock, unix_us
from headrace_common.errors import HeadraceError
from headrace_common.limits.limiter import Mode
from headrace_common.limits.memory_limiter import MemoryLimiter
from headrace_common.limits.plans import (
    Plans,
    amounts_of,
    answer_of,
    check_id,
    check_lease_ms,
)
from headrace_common.proto_wire import Encoded
from headrace_common.rpc import Call
from headrace_common.rpc_server import RpcServer
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_ratelimit.exchange import exchange

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["RateLimit"]


class FakeRateLimit:
    """RateLimit servicer in memory.

    Args:
        clock: wall time; a `FakeClock` lets a minute pass at once.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        # True: as without Redis. Prepaid money is refused, answers carry `degraded`.
        self.degraded = False
        # Raised by every method while set.
        self.failure: HeadraceError | None = None
        # For tests to look at.
        self.admits: list[pb.AdmitRequest] = []
        self.settles: list[pb.SettleRequest] = []
        self._tenants: dict[str, MemoryLimiter] = {}
        self._plans = Plans()
        # Ends the streams.
        self.stopping = asyncio.Event()

    async def Admit(self, request: pb.AdmitRequest, _call: Call) -> pb.AdmitResponse:  # noqa: N802 - contract name
        """Decide over all limits of a request at once."""
        return self._admit(request)

    async def Settle(self, request: pb.SettleRequest, _call: Call) -> pb.SettleResponse:  # noqa: N802 - contract name
        """Replace a reservation by what was used."""
        return self._settle(request)

    async def Renew(self, request: pb.RenewRequest, _call: Call) -> pb.RenewResponse:  # noqa: N802 - contract name
        """Extend leases."""
        return self._renew(request)

    def Exchange(  # noqa: N802 - contract name
        self, batches: AsyncIterator[pb.CallBatch], _call: Call
    ) -> AsyncIterator[Encoded]:
        """Many calls on one stream."""
        return exchange(self, batches, self.stopping)

    # As `exchange` starts them.

    def admit(
        self, request: pb.AdmitRequest, done: Callable[[pb.AdmitResponse | HeadraceError], None]
    ) -> None:
        """Decide at once."""
        done(self._admit(request))

    def settle(
        self, request: pb.SettleRequest, done: Callable[[pb.SettleResponse | HeadraceError], None]
    ) -> None:
        """Settle at once."""
        done(self._settle(request))

    def renew(
        self, request: pb.RenewRequest, done: Callable[[pb.RenewResponse | HeadraceError], None]
    ) -> None:
        """Renew at once."""
        done(self._renew(request))

    def _admit(self, request: pb.AdmitRequest) -> pb.AdmitResponse:
        self._fail()
        plan = self._plans.of(request)
        if plan.mode is not Mode.PEEK:
            self.admits.append(request)
        if self.degraded and plan.prepaid and plan.charges.budgets:
            return pb.AdmitResponse(outcome=pb.AdmitResponse.OUTCOME_UNAVAILABLE, degraded=True)
        decision = self._tenant(plan.tenant_id).admit(
            plan.lease_id,
            plan.lease_us,
            plan.charges.charges,
            plan.amounts,
            unix_us(self.clock),
            plan.mode,
        )
        return answer_of(plan, decision, degraded=self.degraded)

    def _settle(self, request: pb.SettleRequest) -> pb.SettleResponse:
        self._fail()
        check_id("tenant_id", request.tenant_id)
        check_id("lease_id", request.lease_id)
        actual = amounts_of(request.actual)
        self.settles.append(request)
        limiter = self._tenant(request.tenant_id)
        return pb.SettleResponse(
            settled=limiter.settle(request.lease_id, actual, unix_us(self.clock))
        )

    def _renew(self, request: pb.RenewRequest) -> pb.RenewResponse:
        self._fail()
        check_id("tenant_id", request.tenant_id)
        check_lease_ms(request.lease_ms)
        unknown = self._tenant(request.tenant_id).renew(
            list(request.lease_ids), request.lease_ms * 1000, unix_us(self.clock)
        )
        return pb.RenewResponse(unknown_lease_ids=unknown)

    def live_leases(self) -> list[str]:
        """Ids of all leases that were neither settled nor have expired."""
        now_us = unix_us(self.clock)
        for limiter in self._tenants.values():
            limiter.sweep(now_us)
        return sorted(lease for limiter in self._tenants.values() for lease in limiter.leases)

    def _tenant(self, tenant_id: str) -> MemoryLimiter:
        return self._tenants.setdefault(tenant_id, MemoryLimiter())

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure


class FakeRateLimitServer:
    """A fake rate limiter behind a real `RpcServer` on a free port. An async context manager."""

    def __init__(self, fake: FakeRateLimit | None = None, address: str = "127.0.0.1:0") -> None:
        self.fake = fake or FakeRateLimit()
        self._server = RpcServer(address, [(DESCRIPTOR, self.fake)])

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self._server.port}"

    async def __aenter__(self) -> FakeRateLimitServer:
        await self._server.start()
        await self._server.set_ready(True)
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.fake.stopping.set()
        await self._server.stop(0)
