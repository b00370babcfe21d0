"""Composition root of the router."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from random import Random

from headrace_common.awake import AwakeClock, awake_timeout
from headrace_common.clock import Clock
from headrace_common.kv_index import IndexKeys
from headrace_common.lifecycle import Lifecycle, cancel_and_wait, supervise
from headrace_common.metrics import ObservabilityServer, RpcMetrics, new_registry
from headrace_common.redis_client import background_client
from headrace_common.rpc_server import RpcServer
from headrace_common.settings import split_address
from headrace_contracts.router.v1 import router_pb2
from headrace_router.assumed import AssumedBlocks
from headrace_router.booking_link import BookingLink
from headrace_router.breaker import Breakers
from headrace_router.decisions import RecentDecisions
from headrace_router.decode_prediction import DecodePredictor
from headrace_router.desk import PickDesk
from headrace_router.discovery import Discovery, resolve_host
from headrace_router.dispatcher import Dispatcher
from headrace_router.in_flight import InFlightBlocks
from headrace_router.index_feed import IndexFeed
from headrace_router.known_prefixes import KnownPrefixes
from headrace_router.load_guard import LoadBook, LoadGuard
from headrace_router.metrics import RouterMetrics
from headrace_router.mirror import PrefixMirror
from headrace_router.pick import Pipeline
from headrace_router.policy_file import load_policy_file
from headrace_router.policy_watch import PolicyWatch
from headrace_router.prediction import PrefillPredictor
from headrace_router.replicas import ReplicaTable
from headrace_router.server import RouterServicer
from headrace_router.settings import RouterSettings
from headrace_router.watch import WorkerWatch

DESCRIPTOR = router_pb2.DESCRIPTOR.services_by_name["Router"]
# How often readiness is looked at: a frozen worker shows by time alone.
_CHECK_S = 0.1
# A router that starts refuses connections for so long at most, until it has heard of its workers:
# gateways do without it better than with one that knows nobody.
_FIRST_LOOK_S = 1.0


class RouterApp:
    """The running service. Tests start it in-process; `__main__` starts it as a process.

    Two notions of readiness: the router is *ready* while it can route, that is while some replica
    may be picked; the index is *warm* once it was read whole (a metric). A cold index makes
    answers slower, never wrong, so it does not hold back readiness.

    Args:
        settings: all knobs.
        clock: the service's time.
        keys: Redis key names.
    """

    def __init__(
        self, settings: RouterSettings, clock: Clock, keys: IndexKeys | None = None
    ) -> None:
        policy_file = load_policy_file(settings.policy_file)
        registry = new_registry()
        # Reports that lie unread after an own pause are not old, nor are other routers silent.
        clock = AwakeClock(clock)
        self.lifecycle, self._settings, self._clock = Lifecycle(), settings, clock
        self.metrics = RouterMetrics(registry)
        self.table, self.mirror = ReplicaTable(), PrefixMirror(settings.index_max_bytes)
        self.loads = LoadBook(InFlightBlocks())
        self._predictor = PrefillPredictor(policy_file.pick.default_prefill_tokens_per_s)
        self._decode = DecodePredictor()
        self._redis = background_client(settings.redis_url)
        keys = keys or IndexKeys()
        self.bookings = BookingLink(self._redis, keys.bookings, self.loads, clock, self.metrics)
        self.feed = IndexFeed(
            self._redis,
            keys,
            self.mirror,
            clock,
            self.metrics,
            settings.index_audit_interval_s,
        )
        self._prefixes = self._make_prefixes()
        self.breakers = self._make_breakers()
        self._desk = PickDesk(
            self._make_pipeline(),
            self.loads,
            self._predictor,
            self._decode,
            policy_file,
            clock,
            Random(settings.random_seed),  # noqa: S311 - spreads load, guards nothing
            self.metrics,
        )
        self._desk.bid(self.bookings.exchange.bids)
        self._desk.watch_failures(self._note_failure)
        self.bookings.exchange.watch_failures(self.breakers.failed)
        self._dispatcher = Dispatcher(self._desk, clock)
        self.table.on_change(self._desk.notice_change)
        self.table.on_change(self._describe_replicas)
        self._described_version = -1
        # Seen since the start: of one that nobody serves any more the operator must hear.
        self._models: set[str] = set()
        self._servicer = RouterServicer(
            self._dispatcher,
            self.table,
            RecentDecisions(settings.max_recent_decisions),
            clock,
            self.feed.staleness_s,
        )
        self.rpc = RpcServer(settings.listen, [(DESCRIPTOR, self._servicer)], RpcMetrics(registry))
        host, port = split_address(settings.metrics_listen)
        self._observability = ObservabilityServer(
            host,
            port,
            registry,
            lambda: self.lifecycle.is_ready,
            details=lambda: {"index_warm": self.feed.is_warm},
        )
        self._tasks: list[asyncio.Task[None]] = []

    def _make_breakers(self) -> Breakers:
        def count(state: str) -> None:
            self.metrics.breaker_changes.labels(state).inc()

        breakers = Breakers(self._clock, on_change=count)
        self.loads.listen(breakers, to_peers=True)
        self.metrics.broken_replicas.set_function(lambda: breakers.num_open)
        return breakers

    def _note_failure(self, guard: LoadGuard) -> None:
        self.breakers.failed(guard)
        self.bookings.exchange.failed(guard)

    def _make_pipeline(self) -> Pipeline:
        return Pipeline(
            self.table, self._prefixes, self.loads, self._predictor, self._decode, self.breakers
        )

    def _make_prefixes(self) -> KnownPrefixes:
        settings, is_indexed = self._settings, self.mirror.replicas().__contains__
        assumed = AssumedBlocks(
            settings.assumed_ttl_s, settings.index_max_bytes // 4, self._clock, is_indexed
        )
        self.loads.listen(assumed)
        return KnownPrefixes(self.mirror, assumed, settings.tier_weights())

    @property
    def metrics_port(self) -> int:
        """Where /metrics is."""
        return self._observability.port

    async def start(self) -> None:
        """Learn which workers are there, then serve. Redis and workers may still be down.

        Raises:
            OSError: the address cannot be bound.
        """
        discovery = Discovery(
            self._settings.worker_entries(),
            self.table,
            self._watch,
            resolve=resolve_host,
            resolve_interval_s=self._settings.resolve_interval_s,
            on_failure=self.metrics.watch_failures.inc,
            clock=self._clock,
        )
        self._supervise("discovery", discovery.run)
        with contextlib.suppress(TimeoutError):
            async with awake_timeout(_FIRST_LOOK_S):
                await discovery.looked.wait()
        await self.rpc.start()
        self._supervise("index feed", self.feed.follow, self.metrics.index_failures.inc)
        self._supervise("index sweep", self.feed.sweep)
        self._supervise("bookings", self.bookings.run, self.metrics.peer_failures.inc)
        self._supervise("silent routers", self.bookings.expire)
        self._supervise("queues", self._dispatcher.run)
        if self._settings.policy_file is not None:
            watch = PolicyWatch(self._settings.policy_file, self._desk.use, self.metrics)
            self._supervise("policy file", watch.run)
        self._supervise("readiness", self._watch_readiness)

    async def stop(self, grace_s: float | None = None) -> None:
        """Refuse new picks, let running calls end for a while, then stop."""
        self.lifecycle.stopping.set()
        self._servicer.end_watches()
        await self.rpc.stop(self._settings.drain_grace_s if grace_s is None else grace_s)
        await cancel_and_wait(*self._tasks)
        await self._redis.aclose()
        self._observability.close()

    def _supervise(
        self,
        name: str,
        body: Callable[[], Awaitable[None]],
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        supervised = supervise(name, body, max_delay_s=1.0, on_failure=on_failure)
        self._tasks.append(asyncio.create_task(supervised))

    async def _watch(self, address: str) -> None:
        watch = WorkerWatch(
            address, self.table, self.loads, self._predictor, self._decode, self._clock
        )
        await watch.follow()

    def _describe_replicas(self) -> None:
        # Called at each load report too.
        if self._described_version != self.table.version:
            self._described_version = self.table.version
            self._prefixes.describe(self.table.all())

    def _show_models(self, now_s: float) -> None:
        self._models.update(model for it in self.table.all() for model in it.models)
        for model in self._models:
            num_ready = sum(it.is_ready(now_s) for it in self.table.serving(model))
            self.metrics.ready_replicas.labels(model).set(num_ready)

    async def _watch_readiness(self) -> None:
        while True:
            now_s = self._clock.now_s()
            self.table.note_silent(now_s)
            everyone = self.table.all()
            num_ready = sum(replica.is_ready(now_s) for replica in everyone)
            self.metrics.replicas.labels("ready").set(num_ready)
            self.metrics.replicas.labels("not_ready").set(len(everyone) - num_ready)
            self._show_models(now_s)
            if (num_ready > 0) != self.lifecycle.is_ready and not self.lifecycle.stopping.is_set():
                self.lifecycle.set_ready(num_ready > 0)
                await self.rpc.set_ready(num_ready > 0)
            keys = {replica.key for replica in everyone}
            self._predictor.forget(keys)
            self._decode.forget(keys)
            self.breakers.keep_only(keys)
            await asyncio.sleep(_CHECK_S)
