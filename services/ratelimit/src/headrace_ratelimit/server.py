"""The admission service: its contract's methods and how the service is put together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial

from google.protobuf.descriptor import ServiceDescriptor

from headrace_common.clock import Clock, SystemClock
from headrace_common.lifecycle import Lifecycle, cancel_and_wait, serve, supervise
from headrace_common.limits.local_share import LocalShare
from headrace_common.metrics import ObservabilityServer, RpcMetrics, new_registry
from headrace_common.proto_wire import Encoded
from headrace_common.rpc import Call
from headrace_common.rpc_server import RpcServer
from headrace_common.settings import join_address, split_address
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_ratelimit.admitter import Admitter
from headrace_ratelimit.batcher import Batcher, answered
from headrace_ratelimit.clients.ledger import LedgerClient
from headrace_ratelimit.exchange import exchange
from headrace_ratelimit.metrics import RateLimitMetrics
from headrace_ratelimit.rebuild import Rebuilder
from headrace_ratelimit.settings import RateLimitSettings

_log = logging.getLogger(__name__)

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["RateLimit"]


class RateLimitServicer:
    """The contract's methods.

    Args:
        admitter: decides.
    """

    def __init__(self, admitter: Admitter) -> None:
        self._admitter = admitter
        # Streams end once it is set: they would go on for ever.
        self.stopping = asyncio.Event()

    async def Admit(self, request: pb.AdmitRequest, _call: Call) -> pb.AdmitResponse:  # noqa: N802 - contract name
        """Decide over all limits of a request at once."""
        return await answered(partial(self._admitter.admit, request))

    async def Settle(self, request: pb.SettleRequest, _call: Call) -> pb.SettleResponse:  # noqa: N802 - contract name
        """Replace a reservation by what was used; without Redis, once it is back."""
        return await answered(partial(self._admitter.settle, request))

    async def Renew(self, request: pb.RenewRequest, _call: Call) -> pb.RenewResponse:  # noqa: N802 - contract name
        """Extend leases."""
        return await answered(partial(self._admitter.renew, request))

    def Exchange(  # noqa: N802 - contract name
        self, batches: AsyncIterator[pb.CallBatch], _call: Call
    ) -> AsyncIterator[Encoded]:
        """Many calls on one stream."""
        return exchange(self._admitter, batches, self.stopping)


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
        self._ledger = LedgerClient(settings.billing_address) if settings.billing_address else None
        self._rebuilder: Rebuilder | None = None
        self._batcher = Batcher(
            settings.redis_url,
            settings.redis_timeout_s,
            clock,
            metrics,
            has_ledger=self._ledger is not None,
            on_revived=self._compare_budgets,
        )
        if self._ledger is not None:
            self._rebuilder = Rebuilder(self._ledger, self._batcher, clock, metrics)
        local = LocalShare(settings.num_replicas, settings.overdraft_ratio, clock)
        self._admitter = Admitter(
            self._batcher, local, self._rebuilder, metrics, settings.redis_timeout_s
        )
        self._servicer = RateLimitServicer(self._admitter)
        services: list[tuple[ServiceDescriptor, object]] = [(DESCRIPTOR, self._servicer)]
        self._rpc = RpcServer(settings.listen, services, RpcMetrics(self.registry))
        self._observability: ObservabilityServer | None = None
        self._comparing: asyncio.Task[None] | None = None

    def _compare_budgets(self) -> None:
        if self._rebuilder is not None:
            self._rebuilder.compare_all()

    @property
    def address(self) -> str:
        """Where it listens."""
        return join_address(split_address(self._settings.listen)[0], self._rpc.port)

    async def start(self) -> None:
        """Listen. Ready at once, with or without Redis: every answer is bounded in time."""
        await self._batcher.start()
        await self._rpc.start()
        host, port = split_address(self._settings.metrics_listen)
        self._observability = ObservabilityServer(
            host, port, self.registry, lambda: self._lifecycle.is_ready
        )
        if self._rebuilder is not None:
            body = supervise("comparing budgets with the ledger", self._rebuilder.run)
            self._comparing = asyncio.create_task(body)
        await self._rpc.set_ready(True)
        self._lifecycle.set_ready(True)
        _log.info("listening on %s", self.address)

    async def stop(self) -> None:
        """Let running calls end, settle what is queued, leave."""
        self._servicer.stopping.set()
        await self._rpc.stop(self._settings.drain_grace_s)
        await cancel_and_wait(self._comparing)
        await self._admitter.close()
        if self._rebuilder is not None:
            await self._rebuilder.close()
        await self._batcher.close()
        if self._ledger is not None:
            await self._ledger.close()
        if self._observability is not None:
            self._observability.close()


async def serve_limits(settings: RateLimitSettings) -> None:
    """Run until SIGTERM or SIGINT."""
    settings.log_values()
    lifecycle = Lifecycle()
    await serve(RateLimitServer(settings, lifecycle), lifecycle)
