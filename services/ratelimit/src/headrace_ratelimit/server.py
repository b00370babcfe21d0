"""The admission service: its contract's methods and how the service is put together."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

from headrace_common.clock import Clock, SystemClock
from headrace_common.lifecycle import Lifecycle
from headrace_common.metrics import ObservabilityServer, RpcMetrics, new_registry
from headrace_common.rpc import Call
from headrace_common.rpc_server import RpcServer
from headrace_common.settings import split_address
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_ratelimit.batcher import Batcher, StoreDownError
from headrace_ratelimit.degraded import LocalShare
from headrace_ratelimit.exchange import exchange
from headrace_ratelimit.metrics import RateLimitMetrics
from headrace_ratelimit.plans import amounts_of, answer_of, check_id, check_lease_ms, plan_of
from headrace_ratelimit.settings import RateLimitSettings
from headrace_ratelimit.store import admit_command, decision_of, renew_command, settle_command

_log = logging.getLogger(__name__)

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["RateLimit"]


class RateLimitServicer:
    """Admits by Redis, or by the local share while Redis is away.

    Args:
        batcher: the way to Redis.
        local: decides without it.
        metrics: see `RateLimitMetrics`.
    """

    def __init__(self, batcher: Batcher, local: LocalShare, metrics: RateLimitMetrics) -> None:
        self._batcher, self._local, self._metrics = batcher, local, metrics

    async def Admit(self, request: pb.AdmitRequest, _call: Call) -> pb.AdmitResponse:  # noqa: N802 - contract name
        """Decide over all limits of a request at once."""
        plan = plan_of(request)
        try:
            reply = await self._batcher.call(admit_command(plan))
        except StoreDownError:
            response = self._local.admit(plan)
        else:
            decision = decision_of(plan, reply)
            self._local.note(plan, decision)
            response = answer_of(plan, decision)
        self._count(response)
        return response

    async def Settle(self, request: pb.SettleRequest, _call: Call) -> pb.SettleResponse:  # noqa: N802 - contract name
        """Replace a reservation by what was used; without Redis, once it is back."""
        check_id("tenant_id", request.tenant_id)
        check_id("lease_id", request.lease_id)
        actual = amounts_of(request.actual)
        foreign = self._local.settle(request.tenant_id, request.lease_id, actual)
        command = settle_command(request.tenant_id, request.lease_id, actual, foreign or [])
        try:
            settled = await self._batcher.call(command, must_run=True) == 1
        except StoreDownError:
            settled = True
        return pb.SettleResponse(settled=settled or foreign is not None)

    async def Renew(self, request: pb.RenewRequest, _call: Call) -> pb.RenewResponse:  # noqa: N802 - contract name
        """Extend leases. Without Redis nothing is called unknown: nobody can tell."""
        check_id("tenant_id", request.tenant_id)
        for lease_id in request.lease_ids:
            check_id("lease_ids", lease_id)
        check_lease_ms(request.lease_ms)
        tenant_id, lease_us = request.tenant_id, request.lease_ms * 1000
        self._local.renew(tenant_id, list(request.lease_ids), lease_us)
        lease_ids = [i for i in request.lease_ids if not self._local.owns(tenant_id, i)]
        if not lease_ids:
            return pb.RenewResponse()
        try:
            reply = await self._batcher.call(renew_command(tenant_id, lease_ids, lease_us))
        except StoreDownError:
            return pb.RenewResponse()
        return pb.RenewResponse(unknown_lease_ids=[lease_id.decode() for lease_id in reply])

    def Exchange(  # noqa: N802 - contract name
        self, batches: AsyncIterator[pb.CallBatch], call: Call
    ) -> AsyncIterator[pb.AnswerBatch]:
        """Many calls on one stream."""
        return exchange(self, batches, call)

    def _count(self, response: pb.AdmitResponse) -> None:
        outcome = pb.AdmitResponse.Outcome.Name(response.outcome)
        dimension = pb.Dimension.Name(response.binding_dimension)
        self._metrics.decisions.labels(
            outcome.removeprefix("OUTCOME_").lower(),
            dimension.removeprefix("DIMENSION_").lower() if response.binding_dimension else "none",
            str(response.degraded).lower(),
        ).inc()


class RateLimitServer:
    """The whole service, for `__main__` and for tests.

    Args:
        settings: see `RateLimitSettings`.
        lifecycle: says when it is ready.
        clock: wall and monotonic time.
    """

    def __init__(
        self, settings: RateLimitSettings, lifecycle: Lifecycle, clock: Clock | None = None
    ) -> None:
        clock = clock or SystemClock()
        self._settings, self._lifecycle = settings, lifecycle
        self.registry = new_registry()
        metrics = RateLimitMetrics(self.registry)
        self._batcher = Batcher(settings.redis_url, settings.redis_timeout_s, clock, metrics)
        local = LocalShare(settings.num_replicas, settings.overdraft_ratio, clock)
        servicer = RateLimitServicer(self._batcher, local, metrics)
        self._rpc = RpcServer(settings.listen, [(DESCRIPTOR, servicer)], RpcMetrics(self.registry))
        self._observability: ObservabilityServer | None = None

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"{split_address(self._settings.listen)[0]}:{self._rpc.port}"

    async def start(self) -> None:
        """Listen. Ready at once, with or without Redis: every answer is bounded in time."""
        await self._batcher.start()
        await self._rpc.start()
        host, port = split_address(self._settings.metrics_listen)
        self._observability = ObservabilityServer(
            host, port, self.registry, lambda: self._lifecycle.is_ready
        )
        await self._rpc.set_ready(True)
        self._lifecycle.set_ready(True)

    async def stop(self) -> None:
        """Let running calls end, settle what is queued, leave."""
        await self._rpc.stop(self._settings.drain_grace_s)
        await self._batcher.close()
        if self._observability is not None:
            self._observability.close()


async def serve(settings: RateLimitSettings) -> None:
    """Run until SIGTERM."""
    settings.log_values()
    lifecycle = Lifecycle()
    lifecycle.install_signals()
    server = RateLimitServer(settings, lifecycle)
    await server.start()
    _log.info("listening on %s", server.address)
    await lifecycle.stopping.wait()
    await server.stop()
