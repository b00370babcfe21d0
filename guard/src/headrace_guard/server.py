"""Composition root: builds the servicer, serves, drains."""

from __future__ import annotations

import logging

from headrace_common.clock import SystemClock
from headrace_common.lifecycle import Lifecycle
from headrace_common.metrics import ObservabilityServer, RpcMetrics, new_registry
from headrace_common.rpc_server import RpcServer
from headrace_common.settings import split_address
from headrace_contracts.guard.v1 import guard_pb2
from headrace_guard.classifiers.blocklist import BlocklistCache
from headrace_guard.cpu_pool import CpuPool
from headrace_guard.metrics import GuardMetrics
from headrace_guard.plan import Planner
from headrace_guard.policy import Policy
from headrace_guard.servicer import GuardServicer, Limits
from headrace_guard.settings import GuardSettings

_log = logging.getLogger(__name__)
DESCRIPTOR = guard_pb2.DESCRIPTOR.services_by_name["Guard"]


class GuardApp:
    """One guard process. `start` serves, `stop` drains.

    Args:
        settings: where and how much.
        policies: by name; see `policy.load_policies`.
    """

    def __init__(self, settings: GuardSettings, policies: dict[str, Policy]) -> None:
        self.lifecycle = Lifecycle()
        self._settings = settings
        self._registry = new_registry()
        metrics = GuardMetrics(self._registry)
        self._pool = CpuPool(
            settings.num_threads, settings.max_waiting_texts, metrics.long_texts_waiting
        )
        planner = Planner(
            policies,
            BlocklistCache(
                settings.cached_blocklists,
                settings.max_blocklist_terms,
                settings.max_blocklist_chars,
            ),
        )
        limits = Limits(settings.check_budget_s, settings.max_input_chars, settings.max_held_chars)
        servicer = GuardServicer(planner, self._pool, limits, SystemClock(), metrics)
        self._rpc = RpcServer(settings.listen, [(DESCRIPTOR, servicer)], RpcMetrics(self._registry))
        self._observability: ObservabilityServer | None = None

    @property
    def port(self) -> int:
        """Port that is served."""
        return self._rpc.port

    @property
    def metrics_port(self) -> int:
        """Port of /metrics, /health and /ready; 0 before `start`."""
        return self._observability.port if self._observability else 0

    async def start(self) -> None:
        """Listen and say ready: the guard waits for nobody."""
        host, port = split_address(self._settings.metrics_listen)
        self._observability = ObservabilityServer(
            host, port, self._registry, lambda: self.lifecycle.is_ready
        )
        await self._rpc.start()
        await self._rpc.set_ready(True)
        self.lifecycle.set_ready(True)
        _log.info("serving on port %d, metrics on port %d", self.port, self.metrics_port)

    async def stop(self) -> None:
        """Take no new calls, let running streams end, leave."""
        self.lifecycle.set_ready(False)
        await self._rpc.stop(self._settings.drain_grace_s)
        self._pool.close()
        if self._observability is not None:
            self._observability.close()


async def serve(settings: GuardSettings, policies: dict[str, Policy]) -> None:
    """Run a guard until a stop signal."""
    app = GuardApp(settings, policies)
    app.lifecycle.install_signals()
    await app.start()
    await app.lifecycle.stopping.wait()
    await app.stop()
