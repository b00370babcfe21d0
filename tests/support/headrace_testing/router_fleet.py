"""A small fleet for tests: real routers, the real cache index, one Redis, fake workers.

Everything runs in the test's process but Redis, and ends with the stack it was made with.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

from headrace_cache_index.app import CacheIndexApp
from headrace_cache_index.settings import CacheIndexSettings
from headrace_common.blocks import chain, chain_key, join
from headrace_common.clock import SystemClock
from headrace_common.redis_client import background_client
from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_contracts.router.v1 import router_pb2 as pb
from headrace_router.app import DESCRIPTOR, RouterApp
from headrace_router.settings import RouterSettings
from headrace_testing.fake_publisher import FakePublisher
from headrace_testing.fake_worker import MODEL, FakeWorker, FakeWorkerServer
from headrace_testing.servers import LocalServer
from headrace_testing.waiting import eventually, free_port
from headrace_testing.web import fetch

PICK = method_ref(DESCRIPTOR, "Pick", pb.PickMessage, pb.Decision)
PROMPT = list(range(16 * 40))
HASHES = chain(chain_key("any"), PROMPT)


class Router:
    """One running router and a client of it."""

    def __init__(self, app: RouterApp) -> None:
        self.app, self.client = app, SessionClient(f"127.0.0.1:{app.rpc.port}")

    async def pick(self, hashes: list[bytes] | None = None) -> pb.Decision:
        """Ask for a replica, and give it back at once."""
        async with await self.client.start(PICK, timeout_s=10) as call:
            call.send(pb.PickMessage(pick=pick_request(hashes)))
            decision = await call.receive()
            assert decision is not None
            return decision

    async def goes_to(self, name: str, hit_blocks: int) -> bool:
        """Whether a pick with the known prefix goes to *name* for its blocks, every time."""
        for _ in range(3):
            decision = await self.pick(HASHES)
            if decision.replica.worker_id != name or decision.predicted_hit_blocks != hit_blocks:
                return False
        return True

    async def nobody_has_it(self) -> bool:
        """Whether no replica is expected to hold any of the known prefix."""
        decision = await self.pick(HASHES)
        return all(one.hit_blocks == 0 for one in decision.candidates)

    def ready(self) -> tuple[int, dict[str, Any]]:
        """Ask /ready. Blocks: call it on a thread."""
        status, body = fetch(f"http://127.0.0.1:{self.app.metrics_port}/ready")
        return status, json.loads(body)

    async def stop(self) -> None:
        """Stop both."""
        await self.client.close()
        await self.app.stop(0)


class RouterFleet:
    """Everything around some routers, started and stopped together."""

    def __init__(self, redis: LocalServer, stack: AsyncExitStack) -> None:
        self.redis, self._stack = redis, stack
        self.url = f"redis://127.0.0.1:{redis.port}/0"
        self.index_port = free_port()
        self.workers: dict[str, FakeWorkerServer] = {}
        self.publishers: dict[str, FakePublisher] = {}
        self.worker_class = FakeWorker
        self.routers: list[Router] = []

    async def start(self, *names: str, num_routers: int = 1) -> None:
        """Start the index, workers of these names, and routers that see all of them."""
        await self.start_index()
        self._stack.push_async_callback(self.stop_index)
        for name in names:
            await self.start_worker(name, 1)
        for _ in range(num_routers):
            await self.start_router()
        await eventually(lambda: all(router.app.feed.is_warm for router in self.routers))

    @property
    def app(self) -> RouterApp:
        """The first router."""
        return self.routers[0].app

    @property
    def client(self) -> SessionClient:
        """The first router's client."""
        return self.routers[0].client

    async def start_router(self) -> Router:
        """Start a router and wait until it sees every worker; its index may still be cold."""
        addresses = ",".join(worker.address for worker in self.workers.values())
        settings = RouterSettings.model_validate(
            {
                "redis_url": self.url,
                "workers": addresses,
                "index_audit_interval_s": 0.2,
                "random_seed": 1,
            }
        )
        app = RouterApp(settings, SystemClock())
        await app.start()
        router = Router(app)
        self._stack.push_async_callback(router.stop)
        self.routers.append(router)
        await eventually(lambda: len(app.table.serving(MODEL)) == len(self.workers))
        await eventually(lambda: app.lifecycle.is_ready)
        return router

    async def start_index(self) -> None:
        """Start the cache index."""
        listen = f"127.0.0.1:{self.index_port}"
        settings = CacheIndexSettings.model_validate(
            {"redis_url": self.url, "lease_s": 1.2, "listen": listen}
        )
        self.index = CacheIndexApp(settings, SystemClock())
        await self.index.start()

    async def stop_index(self) -> None:
        """Stop the cache index."""
        await self.index.stop()

    async def start_worker(self, name: str, incarnation: int, address: str = "127.0.0.1:0") -> None:
        """Start a worker and its publisher."""
        worker = self.worker_class(name, incarnation)
        server = self.workers[name] = FakeWorkerServer(worker, address)
        await self._stack.enter_async_context(server)
        publisher = FakePublisher(f"127.0.0.1:{self.index_port}", worker.replica, MODEL)
        self.publishers[name] = publisher
        self._stack.push_async_callback(publisher.close)

    async def pick(self, hashes: list[bytes] | None = None) -> pb.Decision:
        """Ask the first router."""
        return await self.routers[0].pick(hashes)

    async def goes_to(self, name: str, hit_blocks: int) -> bool:
        """Ask the first router; see `Router.goes_to`."""
        return await self.routers[0].goes_to(name, hit_blocks)

    async def nobody_has_it(self) -> bool:
        """Ask the first router; see `Router.nobody_has_it`."""
        return await self.routers[0].nobody_has_it()

    async def flush_redis(self) -> None:
        """Lose all data."""
        async with background_client(self.url) as redis:
            await redis.flushall()


def pick_request(hashes: list[bytes] | None = None) -> pb.PickRequest:
    """Make a request with the known prompt and these hashes."""
    request = pb.PickRequest(request_id="r", model=MODEL, prompt_tokens=len(PROMPT) + 5)
    if hashes is not None:
        request.block_hashes, request.block_size_tokens = join(hashes), 16
    return request
