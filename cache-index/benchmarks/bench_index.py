"""The index in one run on a Redis of its own: lag, writes, and a router killed with 1 M blocks.

``python cache-index/benchmarks/bench_index.py [--blocks 1000000]`` prints, each beside a reference
from the same run:

- *lag*: from a worker's event to the router's mirror, with the index as a process of its own,
  beside one Redis round trip;
- *writes*: blocks a second from the publisher's stream into Redis, beside plain SADDs;
- *restart*: a router process killed and started again: the time to its first decision, to the index
  read whole, and what decisions take meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from headrace_common.clock import SystemClock
from headrace_common.errors import HeadraceError
from headrace_common.kv_index import TIERS, IndexKeys, RegistryEntry, ReplicaKey, chain_ints
from headrace_common.lifecycle import cancel_and_wait
from headrace_common.redis_client import background_client
from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_contracts.cache_index.v1.cache_index_pb2 import IndexDelta
from headrace_contracts.router.v1 import router_pb2
from headrace_contracts.types.v1.types_pb2 import ReplicaRef
from headrace_router.index_feed import IndexFeed
from headrace_router.metrics import RouterMetrics
from headrace_router.mirror import Mirrored, PrefixMirror
from headrace_testing.fake_publisher import FakePublisher
from headrace_testing.fake_worker import MODEL, FakeWorker, FakeWorkerServer
from headrace_testing.servers import valkey
from headrace_testing.waiting import free_port
from headrace_testing.web import fetch

# ruff: noqa: ASYNC110, S101 - polls what has no event; states what holds
_BATCH_BLOCKS = 64
_PLENTY = 4_000_000
_NUM_REPLICAS = 8
_ROUTER = router_pb2.DESCRIPTOR.services_by_name["Router"]
_PICK = method_ref(_ROUTER, "Pick", router_pb2.PickMessage, router_pb2.Decision)
_WARM_UP = re.compile(r"^headrace_router_index_warm_up_seconds (\S+)", re.MULTILINE)


async def main() -> int:
    """Run the three parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="held at the restart")
    parser.add_argument("--batches", type=int, default=1000, help="published for lag and writes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = valkey(Path(folder))
        server.start()
        url = f"redis://127.0.0.1:{server.port}/0"
        redis = background_client(url)
        try:
            async with _index(url) as address:
                await _lag(redis, address, args.batches)
                await _writes(redis, address, args.batches * 4)
            await redis.flushall()
            await _restart(redis, url, args.blocks)
        finally:
            await redis.aclose()
            server.kill()
    return 0


@asynccontextmanager
async def _index(url: str) -> AsyncIterator[str]:
    """Run the service as it is run: as a process of its own."""
    listen, metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
    settings = {"REDIS_URL": url, "LISTEN": listen, "METRICS_LISTEN": metrics}
    process = await _start("headrace_cache_index", "HEADRACE_CACHE_INDEX_", settings)
    try:
        while (await asyncio.to_thread(fetch, f"http://{metrics}/ready"))[0] != 200:
            await asyncio.sleep(0.02)
        yield listen
    finally:
        process.kill()
        await process.wait()


class _Watched(PrefixMirror):
    """A mirror that tells when something new is visible."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = asyncio.Event()

    def apply(self, delta: IndexDelta) -> bool:
        is_applied = super().apply(delta)
        self.changed.set()
        return is_applied

    def commit(self, key: ReplicaKey, fresh: Mirrored) -> None:
        super().commit(key, fresh)
        self.changed.set()


async def _lag(redis: Redis, address: str, num_batches: int) -> None:
    mirror = _Watched()
    feed = IndexFeed(
        redis, IndexKeys(), mirror, SystemClock(), RouterMetrics(CollectorRegistry()), 3600
    )
    following = asyncio.create_task(feed.follow())
    publisher = FakePublisher(
        address, ReplicaRef(worker_id="lag", incarnation=1), capacity_blocks=_PLENTY
    )
    lags, pings = [], []
    try:
        for _ in range(num_batches):
            chain = [os.urandom(16) for _ in range(_BATCH_BLOCKS)]
            ints = chain_ints(b"".join(chain))
            started = time.perf_counter()
            publisher.store(chain)
            while not mirror.depths(ints):
                mirror.changed.clear()
                await mirror.changed.wait()
            lags.append(time.perf_counter() - started)
            pings.append(await _timed(redis.ping))
    finally:
        await publisher.close()
        await cancel_and_wait(following)
    _tell("lag_p50_ms", _at(lags, 0.5) * 1e3, "round trip", _at(pings, 0.5) * 1e3)
    _tell("lag_p99_ms", _at(lags, 0.99) * 1e3, "round trip", _at(pings, 0.99) * 1e3, "<= 5")


async def _writes(redis: Redis, address: str, num_batches: int) -> None:
    chains = [[os.urandom(16) for _ in range(_BATCH_BLOCKS)] for _ in range(num_batches)]
    publisher = FakePublisher(
        address, ReplicaRef(worker_id="writes", incarnation=1), capacity_blocks=_PLENTY
    )
    started = time.perf_counter()
    for chain in chains:
        publisher.store(chain)
    while not publisher.is_caught_up:
        await asyncio.sleep(0.001)
    ours = num_batches * _BATCH_BLOCKS / (time.perf_counter() - started)
    await publisher.close()
    started = time.perf_counter()
    for start in range(0, num_batches, _BATCH_BLOCKS):
        async with redis.pipeline(transaction=False) as pipe:
            for chain in chains[start : start + _BATCH_BLOCKS]:
                pipe.sadd("reference", *[block[:8] for block in chain])
            await pipe.execute()
    plain = num_batches * _BATCH_BLOCKS / (time.perf_counter() - started)
    _tell("writes_blocks_per_s", ours, "plain SADD", plain)


async def _restart(redis: Redis, url: str, num_blocks: int) -> None:
    await _fill(redis, num_blocks)
    async with FakeWorkerServer(FakeWorker("w0")) as worker:
        router = _Router(url, worker.address)
        await router.start()
        await router.until(router.is_warm)
        calm = [await router.pick() for _ in range(300)]
        router.kill()
        # Killed again while it reads: nothing of that may be left.
        await router.start()
        await router.until(router.can_pick)
        router.kill()
        await router.start()
        started = time.perf_counter()
        first = await router.until(router.can_pick)
        busy = []
        while not await router.is_warm():
            busy += [await router.pick() for _ in range(20)]
        warm = time.perf_counter() - started
        warm_up_s = await router.warm_up_s()
        router.kill()
        await router.close()
    _tell("first_decision_s", first, "warm", warm)
    _tell("warm_up_s", warm_up_s, "per million blocks", warm_up_s * 1e6 / num_blocks, "< 2")
    _tell("pick_while_warming_p50_ms", _at(busy, 0.5) * 1e3, "warm", _at(calm, 0.5) * 1e3)
    _tell("pick_while_warming_p99_ms", _at(busy, 0.99) * 1e3, "warm", _at(calm, 0.99) * 1e3)


async def _fill(redis: Redis, num_blocks: int) -> None:
    """Write the sets as the index does; a lease without end keeps them."""
    keys = IndexKeys()
    for number in range(_NUM_REPLICAS):
        replica = ReplicaKey(f"w{number}", 1)
        left = num_blocks // _NUM_REPLICAS
        while left > 0:
            blocks = [os.urandom(8) for _ in range(min(left, 10_000))]
            await redis.sadd(keys.blocks(MODEL, replica, TIERS[0]), *blocks)
            left -= len(blocks)
        entry = RegistryEntry(1, 1, 2**50, num_blocks, MODEL)
        await redis.hset(keys.registry, replica.worker_id, entry.encode())


class _Router:
    """A router process that may be killed."""

    def __init__(self, redis_url: str, worker: str) -> None:
        self._address, self._metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self._settings = {
            "REDIS_URL": redis_url,
            "WORKERS": worker,
            "LISTEN": self._address,
            "METRICS_LISTEN": self._metrics,
        }
        self._client = SessionClient(self._address)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start and wait until it listens."""
        self._process = await _start("headrace_router", "HEADRACE_ROUTER_", self._settings)
        await self.until(self._listens)

    def kill(self) -> None:
        """End it at once."""
        assert self._process is not None
        self._process.kill()

    async def close(self) -> None:
        """End the client."""
        assert self._process is not None
        await self._process.wait()
        await self._client.close()

    async def until(self, probe: Callable[[], Awaitable[bool]]) -> float:
        """Wait for *probe*; return how long it took."""
        started = time.perf_counter()
        while not await probe():
            await asyncio.sleep(0.005)
        return time.perf_counter() - started

    async def is_warm(self) -> bool:
        """Whether it has read the index."""
        status, body = await self._get("/ready")
        return status != 0 and bool(json.loads(body)["index_warm"])

    async def can_pick(self) -> bool:
        """Whether it decides."""
        try:
            await self.pick()
        except HeadraceError:
            return False
        return True

    async def pick(self) -> float:
        """Pick once; return how long it took."""
        request = router_pb2.PickRequest(
            request_id="r",
            model=MODEL,
            prompt_tokens=16_100,
            block_size_tokens=16,
            block_hashes=os.urandom(16_000),
        )
        started = time.perf_counter()
        async with await self._client.start(_PICK, timeout_s=10) as call:
            call.send(router_pb2.PickMessage(pick=request))
            await call.receive()
            return time.perf_counter() - started

    async def warm_up_s(self) -> float:
        """What it says itself."""
        found = _WARM_UP.search((await self._get("/metrics"))[1])
        assert found is not None
        return float(found.group(1))

    async def _listens(self) -> bool:
        return (await self._get("/health"))[0] != 0

    async def _get(self, path: str) -> tuple[int, str]:
        return await asyncio.to_thread(fetch, f"http://{self._metrics}{path}")


async def _start(module: str, prefix: str, settings: dict[str, str]) -> asyncio.subprocess.Process:
    """Start a service with these settings."""
    environment = {
        **os.environ,  # noqa: TID251 - a child's environment, not a setting
        **{f"{prefix}{name}": value for name, value in settings.items()},
    }
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, env=environment,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip


async def _timed(call: Callable[[], Awaitable[object]]) -> float:
    started = time.perf_counter()
    await call()
    return time.perf_counter() - started


def _at(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def _tell(name: str, ours: float, reference: str, other: float, goal: str = "") -> None:
    text = f"{name:28} {ours:12,.2f}  {reference} {other:12,.2f}  ratio {ours / other:7.2f}"
    sys.stdout.write(text + (f"  goal {goal}\n" if goal else "\n"))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
