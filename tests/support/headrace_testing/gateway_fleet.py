"""A real gateway on a free port, between fakes that speak their whole contracts."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
from google.protobuf.descriptor import ServiceDescriptor

from headrace_common.lifecycle import Lifecycle
from headrace_common.rpc_server import RpcServer
from headrace_contracts.billing.v1 import billing_pb2
from headrace_contracts.ratelimit.v1.ratelimit_pb2 import Amounts
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent
from headrace_gateway.app import Gateway
from headrace_gateway.settings import GatewaySettings
from headrace_testing.clock import FakeClock
from headrace_testing.fake_billing import FakeBilling, FakeBillingServer
from headrace_testing.fake_guard import DESCRIPTOR as GUARD
from headrace_testing.fake_guard import FakeGuard
from headrace_testing.fake_ratelimit import DESCRIPTOR as RATE_LIMIT
from headrace_testing.fake_ratelimit import FakeRateLimit
from headrace_testing.fake_router import DESCRIPTOR as ROUTER
from headrace_testing.fake_router import FakeRouter
from headrace_testing.fake_worker import MODEL, FakeWorker, FakeWorkerServer
from headrace_testing.waiting import eventually


class FakeServer:
    """One fake behind a real server. Use as an async context manager; `restart` keeps the port."""

    def __init__(self, descriptor: ServiceDescriptor, servicer: object) -> None:
        self._descriptor, self._servicer = descriptor, servicer
        self._address = "127.0.0.1:0"
        self._server: RpcServer | None = None

    @property
    def address(self) -> str:
        """Where it listens, also while it is down."""
        return self._address

    async def start(self) -> None:
        """Listen."""
        self._server = RpcServer(self._address, [(self._descriptor, self._servicer)])
        await self._server.start()
        await self._server.set_ready(True)
        self._address = f"127.0.0.1:{self._server.port}"

    async def kill(self) -> None:
        """Cut every connection."""
        if self._server is not None:
            await self._server.stop(0, refuses=False)
            self._server = None

    async def __aenter__(self) -> FakeServer:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.kill()


@dataclass
class MemoryUsageLog:
    """Keeps usage events; `is_full` refuses new requests."""

    is_full: bool = False
    events: list[UsageEvent] = field(default_factory=list)

    async def start(self) -> None:
        """Nothing to take over."""

    async def close(self) -> None:
        """Nothing to write."""

    def opened(self, event: UsageEvent) -> asyncio.Future[None]:
        """Keep it."""
        return self.closed(event)

    async def until_recorded(self, recorded: asyncio.Future[None]) -> None:
        """It is."""

    def closed(self, event: UsageEvent) -> asyncio.Future[None]:
        """Keep it, as durable as memory is."""
        self.events.append(event)
        kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        kept.set_result(None)
        return kept

    def closed_events(self) -> list[UsageEvent]:
        """Endings, in order."""
        return [event for event in self.events if event.kind == UsageEvent.KIND_CLOSED]

    def open_requests(self) -> set[str]:
        """Requests that were opened and not closed."""
        opened = {it.request_id for it in self.events if it.kind == UsageEvent.KIND_OPENED}
        return opened - {it.request_id for it in self.closed_events()}


@dataclass
class GatewayFleet:
    """The gateway and everything around it."""

    folder: Path
    billing: FakeBilling = field(default_factory=FakeBilling)
    router: FakeRouter = field(default_factory=FakeRouter)
    guard: FakeGuard = field(default_factory=FakeGuard)
    # Its clock stands: no limit refills during a test.
    limiter: FakeRateLimit = field(default_factory=lambda: FakeRateLimit(FakeClock()))
    usage: MemoryUsageLog = field(default_factory=MemoryUsageLog)
    settings: dict[str, Any] = field(default_factory=dict)
    workers: list[FakeWorkerServer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lifecycle = Lifecycle()
        self.api_key, self.key = self.billing.create_key()
        self.router_server = FakeServer(ROUTER, self.router)
        self.guard_server = FakeServer(GUARD, self.guard)
        self.limiter_server = FakeServer(RATE_LIMIT, self.limiter)
        self.gateway: Gateway
        self._stack = AsyncExitStack()

    async def start(self, num_workers: int = 1) -> None:
        """Start everything; return once the gateway is ready."""
        for idx in range(num_workers):
            await self.add_worker(FakeWorker(worker_id=f"w{idx}"))
        billing = await self._stack.enter_async_context(FakeBillingServer(self.billing))
        for server in (self.router_server, self.guard_server, self.limiter_server):
            await self._stack.enter_async_context(server)
        self.settings = {
            "listen": "127.0.0.1:0",
            "metrics_listen": "127.0.0.1:0",
            "router_address": self.router_server.address,
            "guard_address": self.guard_server.address,
            "ratelimit_address": self.limiter_server.address,
            "billing_address": billing.address,
            "outbox_dir": self.folder,
            "drain_grace_s": 5.0,
            **self.settings,
        }
        self._stack.push_async_callback(self.stop)
        await self._start_gateway()

    async def restart_gateway(self) -> None:
        """Stop the gateway and start another over the same state, on another port."""
        await self.stop()
        self.lifecycle = Lifecycle()
        await self._start_gateway()

    async def _start_gateway(self) -> None:
        settings = GatewaySettings(**self.settings)
        self.gateway = Gateway(settings, self.lifecycle, usage_log=self.usage)
        self.running = asyncio.create_task(self.gateway.run())
        await eventually(lambda: self.running.done() or self.gateway.is_ready)

    async def add_gateway(self) -> Gateway:
        """Start one more gateway between the same services."""
        lifecycle = Lifecycle()
        gateway = Gateway(GatewaySettings(**self.settings), lifecycle, usage_log=self.usage)
        running = asyncio.create_task(gateway.run())

        async def stop() -> None:
            lifecycle.stopping.set()
            await running

        self._stack.push_async_callback(stop)
        await eventually(lambda: running.done() or gateway.is_ready)
        return gateway

    async def stop(self) -> None:
        """Let the gateway drain; raise what it raised."""
        self.lifecycle.stopping.set()
        await self.running

    async def add_worker(self, worker: FakeWorker) -> FakeWorkerServer:
        """Start one more worker."""
        server = await self._stack.enter_async_context(FakeWorkerServer(worker))
        self.workers.append(server)
        self.router.add_worker(worker.worker_id, server.address, [worker.card()])
        return server

    async def close(self) -> None:
        """Stop everything."""
        await self._stack.aclose()

    @property
    def base_url(self) -> str:
        """Where the gateway listens."""
        return f"http://127.0.0.1:{self.gateway.port}"

    def http(self, api_key: str | None = None) -> httpx.AsyncClient:
        """An HTTP client with a key; empty = without."""
        key = self.api_key if api_key is None else api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(base_url=self.base_url, headers=headers, timeout=20)

    def openai(self, api_key: str | None = None) -> openai.AsyncOpenAI:
        """The SDK as an application uses it."""
        return openai.AsyncOpenAI(
            base_url=f"{self.base_url}/v1", api_key=api_key or self.api_key, max_retries=0
        )

    def anthropic(self, api_key: str | None = None) -> anthropic.AsyncAnthropic:
        """Anthropic's SDK as an application uses it."""
        return anthropic.AsyncAnthropic(
            base_url=self.base_url, api_key=api_key or self.api_key, max_retries=0
        )

    def new_key(self, **fields: Any) -> tuple[str, billing_pb2.Key]:
        """One more key."""
        return self.billing.create_key(**fields)

    @property
    def worker(self) -> FakeWorker:
        """The first worker."""
        return self.workers[0].worker

    def settled_amounts(self, request_id: str) -> Amounts:
        """What a request was settled with."""
        (settle,) = [it for it in self.limiter.settles if it.lease_id == request_id]
        return settle.actual

    async def settled(self) -> None:
        """Wait until nothing is open any more, anywhere; less than what ends it by itself."""

        def is_quiet() -> bool:
            return (
                not self.usage.open_requests()
                and not self.limiter.live_leases()
                and not self.router.running
                and not any(server.worker.running for server in self.workers)
            )

        await eventually(is_quiet, within_s=15)


def chat_body(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    """A chat request's body; a field given as `...` is left out."""
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 200, **fields}
    return {name: value for name, value in body.items() if value is not ...}
