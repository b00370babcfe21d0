"""A soak of the prefix index with all-distinct prompts: memory stays under its bounds.

``python bench/soak_index.py [--seconds 60] [--bound-mib 16]`` runs Redis, the cache index, a router
and workers without a model, in one process but for Redis. Workers store blocks that nobody has seen
before, and hold four times what the index may; every prompt that is routed is new. It prints what
was held and fails if the router's mirror or Redis exceed their bounds, or if the process still
grows in the second half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections import deque
from contextlib import AsyncExitStack
from pathlib import Path

from redis.asyncio import Redis

from headrace_cache_index.app import CacheIndexApp
from headrace_cache_index.settings import CacheIndexSettings
from headrace_common.clock import SystemClock
from headrace_common.lifecycle import cancel_and_wait
from headrace_common.redis_client import background_client
from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_contracts.cache_index.v1.cache_index_pb2 import (
    BlocksStored,
    PublishMessage,
    Snapshot,
)
from headrace_contracts.router.v1 import router_pb2
from headrace_contracts.types.v1.types_pb2 import CACHE_TIER_GPU, ReplicaRef
from headrace_router.app import DESCRIPTOR, RouterApp
from headrace_router.mirror import BYTES_PER_ENTRY
from headrace_router.settings import RouterSettings
from headrace_testing.fake_publisher import PUBLISH, batch, hello, removed, stored
from headrace_testing.fake_worker import MODEL, FakeWorker, FakeWorkerServer
from headrace_testing.servers import valkey
from headrace_testing.waiting import free_port

_NUM_WORKERS = 4
_BATCH_BLOCKS = 256
_PROMPT_BLOCKS = 250
_MAX_LATE_GROWTH_RATIO = 0.1
# What Redis itself takes beside the sets: the stream of changes, buffers, its own code.
_REDIS_REST_BYTES = 64 << 20
_PICK = method_ref(DESCRIPTOR, "Pick", router_pb2.PickMessage, router_pb2.Decision)


class Publisher:
    """A worker's cache and its event stream; remembers only what it holds.

    Args:
        address: the cache index.
        replica: who publishes.
        capacity_blocks: beyond it the oldest blocks leave.
    """

    def __init__(self, address: str, replica: ReplicaRef, capacity_blocks: int) -> None:
        self._client, self._replica = SessionClient(address), replica
        self._capacity_blocks = capacity_blocks
        self._held: deque[bytes] = deque()
        self._seq = self._acknowledged_seq = 0
        self.num_snapshots = 0

    async def start(self) -> None:
        """Say Hello."""
        self._call = await self._client.start(PUBLISH)
        capacity = 2 * self._capacity_blocks
        self._call.send(hello(self._replica, model=MODEL, capacity_blocks=capacity))
        self._reader = asyncio.create_task(self._read())

    async def close(self) -> None:
        """Leave."""
        await cancel_and_wait(self._reader)
        await self._client.close()

    async def store(self, hashes: bytes) -> None:
        """Store new blocks in the place of the oldest, and wait until the index has that."""
        self._held.append(hashes)
        events = [stored([hashes])]
        if sum(map(len, self._held)) > 16 * self._capacity_blocks:
            events.append(removed([self._held.popleft()]))
        self._seq += 1
        self._call.send(batch(self._seq, *events))
        while self._acknowledged_seq < self._seq:
            await asyncio.sleep(0.001)
            if self._reader.done():
                self._reader.result()

    async def _read(self) -> None:
        while (reply := await self._call.receive()) is not None:
            if reply.HasField("acknowledged_seq"):
                self._acknowledged_seq = reply.acknowledged_seq
                continue
            self.num_snapshots += 1
            last = len(self._held) - 1
            for idx, hashes in enumerate(self._held):
                blocks = [BlocksStored(block_hashes=hashes, tier=CACHE_TIER_GPU)]
                part = Snapshot(as_of_seq=self._seq, blocks=blocks, last=idx == last)
                self._call.send(PublishMessage(snapshot=part))


class Soak:
    """Everything that runs.

    Args:
        folder: for Redis.
        bound_bytes: of the blocks in Redis; the mirror gets half of it.
        stack: ends what was started.
    """

    def __init__(self, folder: Path, bound_bytes: int, stack: AsyncExitStack) -> None:
        self._folder, self._bound_bytes, self._stack = folder, bound_bytes, stack
        self.num_stored = self.num_picked = 0
        self.most_mirror_bytes = self.most_redis_bytes = 0

    async def start(self) -> None:
        """Start it all."""
        server = valkey(self._folder)
        server.start()
        self._stack.callback(server.kill)
        url, index_address = f"redis://127.0.0.1:{server.port}/0", f"127.0.0.1:{free_port()}"
        self._redis: Redis = background_client(url)
        self._stack.push_async_callback(self._redis.aclose)
        index = CacheIndexApp(
            CacheIndexSettings.model_validate(
                {
                    "redis_url": url,
                    "listen": index_address,
                    "max_index_bytes": self._bound_bytes,
                    "max_stream_entries": 1000,
                }
            ),
            SystemClock(),
        )
        await index.start()
        self._stack.push_async_callback(index.stop)
        addresses = []
        self._publishers = []
        for number in range(_NUM_WORKERS):
            worker = FakeWorker(f"w{number}", 1)
            server_of_worker = await self._stack.enter_async_context(FakeWorkerServer(worker))
            addresses.append(server_of_worker.address)
            capacity_blocks = 4 * self._bound_bytes // BYTES_PER_ENTRY // _NUM_WORKERS
            publisher = Publisher(index_address, worker.replica, capacity_blocks)
            await publisher.start()
            self._publishers.append(publisher)
            self._stack.push_async_callback(publisher.close)
        self._router = RouterApp(
            RouterSettings.model_validate(
                {
                    "redis_url": url,
                    "workers": ",".join(addresses),
                    "index_max_bytes": self._bound_bytes // 2,
                }
            ),
            SystemClock(),
        )
        await self._router.start()
        self._stack.push_async_callback(self._router.stop, 0)
        self._client = SessionClient(f"127.0.0.1:{self._router.rpc.port}")
        self._stack.push_async_callback(self._client.close)
        while not self._router.lifecycle.is_ready:  # noqa: ASYNC110 - has no event
            await asyncio.sleep(0.01)

    async def turn(self) -> None:
        """Store new blocks on each worker and route some new prompts."""
        for publisher in self._publishers:
            await publisher.store(os.urandom(16 * _BATCH_BLOCKS))
            self.num_stored += _BATCH_BLOCKS
        for _ in range(_NUM_WORKERS):
            await self._pick()
        self._look(int((await self._redis.info("memory"))["used_memory"]))

    def faults(self, early_rss: int, late_rss: int) -> list[str]:
        """Say what is wrong."""
        found = []
        if self.most_mirror_bytes > self._bound_bytes // 2:
            found.append("the mirror exceeded its bound")
        if self.most_redis_bytes > self._bound_bytes + _REDIS_REST_BYTES:
            found.append("Redis exceeded its bound")
        if late_rss > early_rss * (1 + _MAX_LATE_GROWTH_RATIO):
            found.append("the process still grows")
        if not self.num_snapshots() or not self.num_evicted():
            found.append("the bounds were never reached: run longer")
        return found

    def num_snapshots(self) -> int:
        """Count the snapshots that the index asked for, to keep its bound."""
        return sum(publisher.num_snapshots for publisher in self._publishers)

    def num_evicted(self) -> int:
        """Count what left the mirror to keep its bound."""
        return self._router.mirror.num_evicted

    async def _pick(self) -> None:
        request = router_pb2.PickRequest(
            request_id=str(self.num_picked),
            model=MODEL,
            prompt_tokens=_PROMPT_BLOCKS * 16 + 1,
            block_size_tokens=16,
            block_hashes=os.urandom(16 * _PROMPT_BLOCKS),
        )
        async with await self._client.start(_PICK, timeout_s=30) as call:
            call.send(router_pb2.PickMessage(pick=request))
            await call.receive()
            progress = router_pb2.PickProgress(first_token=True, output_tokens=1)
            call.send(router_pb2.PickMessage(progress=progress))
        self.num_picked += 1

    def _look(self, redis_bytes: int) -> None:
        mirror_bytes = self._router.mirror.num_entries() * BYTES_PER_ENTRY
        self.most_mirror_bytes = max(self.most_mirror_bytes, mirror_bytes)
        self.most_redis_bytes = max(self.most_redis_bytes, redis_bytes)


async def run(seconds: float, bound_bytes: int) -> list[str]:
    """Run for a while; return what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        async with AsyncExitStack() as stack:
            soak = Soak(Path(folder), bound_bytes, stack)
            await soak.start()
            started, half_rss = time.monotonic(), 0
            while (passed_s := time.monotonic() - started) < seconds:
                await soak.turn()
                if not half_rss and passed_s >= seconds / 2:
                    half_rss = _rss_bytes()
            faults = soak.faults(half_rss, _rss_bytes())
            report = {
                "seconds": round(seconds),
                "distinct_blocks_stored": soak.num_stored,
                "distinct_prompts_routed": soak.num_picked,
                "snapshots": soak.num_snapshots(),
                "evicted": soak.num_evicted(),
                "bound_mib": bound_bytes >> 20,
                "most_mirror_mib": round(soak.most_mirror_bytes / 2**20, 1),
                "most_redis_mib": round(soak.most_redis_bytes / 2**20, 1),
                "rss_at_half_mib": half_rss >> 20,
                "rss_at_end_mib": _rss_bytes() >> 20,
                "faults": faults,
            }
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return faults


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--bound-mib", type=int, default=16)
    options = parser.parse_args()
    return 1 if asyncio.run(run(options.seconds, options.bound_mib << 20)) else 0


if __name__ == "__main__":
    sys.exit(main())
