"""Composition root of the cache index."""

from __future__ import annotations

import asyncio
import logging

from headrace_cache_index.engine_feed import EngineFeed
from headrace_cache_index.engines_file import load_engines_file
from headrace_cache_index.metrics import CacheIndexMetrics
from headrace_cache_index.server import CacheIndexServicer
from headrace_cache_index.settings import CacheIndexSettings
from headrace_cache_index.store import Store, StoreLimits
from headrace_cache_index.sweeper import Sweeper
from headrace_common.clock import Clock
from headrace_common.errors import Unavailable
from headrace_common.kv_index import IndexKeys
from headrace_common.lifecycle import Lifecycle, cancel_and_wait, supervise
from headrace_common.metrics import ObservabilityServer, RpcMetrics, new_registry
from headrace_common.redis_client import background_client
from headrace_common.rpc_server import RpcServer
from headrace_common.settings import split_address
from headrace_contracts.cache_index.v1 import cache_index_pb2

_log = logging.getLogger(__name__)
DESCRIPTOR = cache_index_pb2.DESCRIPTOR.services_by_name["CacheIndex"]
_PING_EVERY_S = 0.5
# What Redis takes for a member of a set, measured; a growing set briefly takes more.
_BYTES_PER_BLOCK = 100
# Renewals per lease: two may fail before it ends.
_RENEWALS_PER_LEASE = 6


class CacheIndexApp:
    """The running service. Tests start it in-process; `__main__` starts it as a process.

    Args:
        settings: all knobs.
        clock: the service's time.
        keys: Redis key names.
    """

    def __init__(
        self, settings: CacheIndexSettings, clock: Clock, keys: IndexKeys | None = None
    ) -> None:
        self.lifecycle = Lifecycle()
        registry = new_registry()
        metrics = CacheIndexMetrics(registry)
        self._settings = settings
        self._redis = background_client(settings.redis_url)
        limits = StoreLimits(
            settings.lease_s,
            settings.blocks_ttl_s,
            settings.max_stream_entries,
            settings.max_index_bytes // _BYTES_PER_BLOCK,
        )
        self._store = Store(self._redis, keys or IndexKeys(), limits)
        self._sweeper = Sweeper(self._store, clock, metrics)
        self._metrics = metrics
        servicer = CacheIndexServicer(
            self._store,
            clock,
            metrics,
            renew_every_s=settings.lease_s / _RENEWALS_PER_LEASE,
            max_blocks_per_replica=settings.max_blocks_per_replica,
        )
        self.rpc = RpcServer(settings.listen, [(DESCRIPTOR, servicer)], RpcMetrics(registry))
        host, port = split_address(settings.metrics_listen)
        self._observability = ObservabilityServer(
            host, port, registry, lambda: self.lifecycle.is_ready
        )
        self._engines = [
            EngineFeed(
                engine,
                self._store,
                metrics,
                renew_every_s=settings.lease_s / _RENEWALS_PER_LEASE,
                max_blocks=settings.max_blocks_per_replica,
            )
            for engine in load_engines_file(settings.engines_file)
        ]
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def metrics_port(self) -> int:
        """Where /metrics is."""
        return self._observability.port

    async def start(self) -> None:
        """Serve. Redis may still be down: then the service is not ready.

        Raises:
            OSError: the address cannot be bound.
        """
        await self.rpc.start()
        for name, body in (("redis check", self._watch_redis), ("sweeper", self._sweep)):
            self._tasks.append(
                asyncio.create_task(
                    supervise(
                        name,
                        body,
                        max_delay_s=1.0,
                        on_failure=self._metrics.store_failures.inc,
                    )
                )
            )
        for engine in self._engines:
            self._tasks.append(
                asyncio.create_task(supervise("an engine's events", engine.follow, max_delay_s=2.0))
            )

    async def stop(self) -> None:
        """Stop serving. Publishers reconnect elsewhere; their leases outlive this process."""
        self.lifecycle.stopping.set()
        # Publishers never end by themselves, so there is nothing to wait for.
        await self.rpc.stop(0)
        await cancel_and_wait(*self._tasks)
        await self._redis.aclose()
        self._observability.close()

    async def _watch_redis(self) -> None:
        # Nothing is awaited on the way out: a cancelled clean-up could hold up the whole stop.
        last = ""
        while True:
            trouble = await self._redis_trouble()
            if trouble and trouble != last:
                _log.warning("Redis: nothing is acknowledged until it answers: %s", trouble)
            last, is_up = trouble, not trouble
            if is_up != self.lifecycle.is_ready and not self.lifecycle.stopping.is_set():
                self.lifecycle.set_ready(is_up)
                await self.rpc.set_ready(is_up)
            await asyncio.sleep(_PING_EVERY_S)

    async def _redis_trouble(self) -> str:
        """Say what is wrong with Redis; empty = nothing."""
        try:
            await self._store.ping()
        except Unavailable as error:
            self._metrics.store_failures.inc()
            return str(error.__cause__ or error)
        return ""

    async def _sweep(self) -> None:
        # First let the publishers of a restarted index come back.
        while True:
            await asyncio.sleep(self._settings.lease_s)
            await self._sweeper.sweep()
