"""The running router with real parts: workers over gRPC, the cache index, Redis."""

import asyncio
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from headrace_cache_index.app import CacheIndexApp
from headrace_cache_index.settings import CacheIndexSettings
from headrace_common.blocks import chain, chain_key, join
from headrace_common.clock import SystemClock
from headrace_common.errors import NoReplica
from headrace_common.redis_client import background_client
from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_contracts.router.v1 import router_pb2 as pb
from headrace_contracts.worker.v1.worker_pb2 import DrainRequest, LoadReport
from headrace_router.app import DESCRIPTOR, RouterApp
from headrace_router.settings import RouterSettings
from headrace_testing.fake_publisher import FakePublisher
from headrace_testing.fake_worker import MODEL, FakeWorker, FakeWorkerServer
from headrace_testing.servers import LocalServer
from headrace_testing.waiting import eventually, free_port

PICK = method_ref(DESCRIPTOR, "Pick", pb.PickMessage, pb.Decision)
PROMPT = list(range(16 * 40))
HASHES = chain(chain_key("any"), PROMPT)


class Fleet:
    """Everything around and inside one router, started and stopped together."""

    def __init__(self, redis: LocalServer, stack: AsyncExitStack) -> None:
        self.redis, self._stack = redis, stack
        self.url = f"redis://127.0.0.1:{redis.port}/0"
        self.index_port = free_port()
        self.workers: dict[str, FakeWorkerServer] = {}
        self.publishers: dict[str, FakePublisher] = {}
        self.worker_class = FakeWorker

    async def start(self, *names: str) -> None:
        await self.start_index()
        self._stack.push_async_callback(self.stop_index)
        for name in names:
            await self.start_worker(name, 1)
        addresses = ",".join(worker.address for worker in self.workers.values())
        settings = RouterSettings(
            redis_url=self.url, workers=addresses, index_audit_interval_s=0.2, random_seed=1
        )
        self.app = RouterApp(settings, SystemClock())
        await self.app.start()
        self._stack.push_async_callback(self.app.stop, 0)
        self.client = SessionClient(f"127.0.0.1:{self.app.rpc.port}")
        self._stack.push_async_callback(self.client.close)
        await eventually(lambda: len(self.app.table.serving(MODEL)) == len(names))
        await eventually(lambda: self.app.lifecycle.is_ready and self.app.feed.is_warm)

    async def start_index(self) -> None:
        settings = CacheIndexSettings(
            redis_url=self.url, lease_s=1.2, listen=f"127.0.0.1:{self.index_port}"
        )
        self.index = CacheIndexApp(settings, SystemClock())
        await self.index.start()

    async def stop_index(self) -> None:
        await self.index.stop()

    async def start_worker(self, name: str, incarnation: int, address: str = "127.0.0.1:0") -> None:
        worker = self.worker_class(name, incarnation)
        server = self.workers[name] = FakeWorkerServer(worker, address)
        await self._stack.enter_async_context(server)
        publisher = FakePublisher(f"127.0.0.1:{self.index_port}", worker.replica, MODEL)
        self.publishers[name] = publisher
        self._stack.push_async_callback(publisher.close)

    async def pick(self, hashes: list[bytes] | None = None) -> pb.Decision:
        request = pb.PickRequest(request_id="r", model=MODEL, prompt_tokens=len(PROMPT) + 5)
        if hashes is not None:
            request.block_hashes, request.block_size_tokens = join(hashes), 16
        async with await self.client.start(PICK, timeout_s=10) as call:
            call.send(pb.PickMessage(pick=request))
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
        decision = await self.pick(HASHES)
        return all(one.hit_blocks == 0 for one in decision.candidates)


@pytest.fixture
async def fleet(own_redis: LocalServer) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield Fleet(own_redis, stack)


async def test_a_prompt_goes_where_its_prefix_is(fleet: Fleet) -> None:
    """From a worker's event through index, Redis and mirror to a decision."""
    await fleet.start("w1", "w2", "w3")
    assert await fleet.nobody_has_it()
    fleet.publishers["w2"].store(HASHES[:30])
    await eventually(lambda: fleet.goes_to("w2", 30))
    fleet.publishers["w3"].store(HASHES)
    await eventually(lambda: fleet.goes_to("w3", 40))
    fleet.publishers["w3"].remove(HASHES[10:])
    await eventually(lambda: fleet.goes_to("w2", 30))
    decision = await fleet.pick(HASHES)
    assert {one.replica.worker_id: one.hit_blocks for one in decision.candidates} == {
        "w1": 0,
        "w2": 30,
        "w3": 10,
    }
    assert decision.index_staleness_s < 2


async def test_the_index_survives_its_own_restart(fleet: Fleet) -> None:
    """While it is down the router goes on with what it knows; afterwards it learns again."""
    await fleet.start("w1", "w2")
    fleet.publishers["w1"].store(HASHES[:30])
    await eventually(lambda: fleet.goes_to("w1", 30))
    await fleet.stop_index()
    fleet.publishers["w1"].store(HASHES[30:])
    assert await fleet.goes_to("w1", 30)
    await fleet.start_index()
    await eventually(lambda: fleet.goes_to("w1", 40))


async def test_a_flush_of_redis_is_repaired_by_snapshots(fleet: Fleet) -> None:
    """The data is gone: publishers are asked, and the decision is as before."""
    await fleet.start("w1", "w2")
    fleet.publishers["w1"].store(HASHES)
    await eventually(lambda: fleet.goes_to("w1", 40))
    fleet.publishers["w1"].asked.clear()
    async with background_client(fleet.url) as redis:
        await redis.flushall()
    await eventually(lambda: fleet.publishers["w1"].asked == ["snapshot_wanted"])
    await eventually(lambda: fleet.goes_to("w1", 40))


async def test_without_redis_picks_go_on(fleet: Fleet) -> None:
    """Killed and back empty: never an error, and in the end whole again."""
    await fleet.start("w1", "w2")
    fleet.publishers["w1"].store(HASHES)
    await eventually(lambda: fleet.goes_to("w1", 40))
    fleet.redis.kill()
    await eventually(lambda: fleet.app.feed.staleness_s() > 0.5)
    assert await fleet.goes_to("w1", 40)
    assert (await fleet.pick(HASHES)).index_staleness_s > 0.5
    assert fleet.app.lifecycle.is_ready
    fleet.redis.start()
    await eventually(lambda: fleet.app.feed.staleness_s() < 0.5)
    await eventually(lambda: fleet.goes_to("w1", 40), within_s=10)


async def test_a_restarted_worker_starts_empty(fleet: Fleet) -> None:
    """Its new incarnation holds nothing, though the address and the name are the same."""
    await fleet.start("w1", "w2")
    fleet.publishers["w1"].store(HASHES)
    await eventually(lambda: fleet.goes_to("w1", 40))
    address = fleet.workers["w1"].address
    await fleet.publishers["w1"].close()
    await fleet.workers["w1"].kill()
    await fleet.start_worker("w1", 2, address)

    def is_back() -> bool:
        replica = fleet.app.table.get(address)
        return replica.is_reachable and replica.key.incarnation == 2

    await eventually(is_back)
    await eventually(fleet.nobody_has_it)
    fleet.publishers["w1"].store(HASHES[:20])
    await eventually(lambda: fleet.goes_to("w1", 20))


async def test_a_killed_worker_is_not_picked_from_then_on(fleet: Fleet) -> None:
    """However tempting its prefix is."""
    await fleet.start("w1", "w2")
    fleet.publishers["w1"].store(HASHES)
    await eventually(lambda: fleet.goes_to("w1", 40))
    await fleet.workers["w1"].kill()
    address = fleet.workers["w1"].address
    await eventually(lambda: not fleet.app.table.get(address).is_reachable, within_s=1)
    for _ in range(10):
        assert (await fleet.pick(HASHES)).replica.worker_id == "w2"


class FreezingWorker(FakeWorker):
    """Reports until it is frozen; then its streams stay open and silent."""

    is_frozen = False

    async def WatchLoad(self, request, call) -> AsyncIterator[LoadReport]:  # noqa: N802 - contract name
        async for report in super().WatchLoad(request, call):
            if self.is_frozen:
                await asyncio.Event().wait()
            yield report


async def test_a_frozen_worker_is_not_picked(fleet: Fleet) -> None:
    """Its connection lives, but its reports have stopped: two seconds are enough."""
    fleet.worker_class = FreezingWorker
    await fleet.start("w1", "w2")
    fleet.publishers["w1"].store(HASHES)
    await eventually(lambda: fleet.goes_to("w1", 40))
    fleet.workers["w1"].worker.is_frozen = True
    await asyncio.sleep(2.5)
    for _ in range(10):
        decision = await fleet.pick(HASHES)
        assert decision.replica.worker_id == "w2"
    reasons = {one.replica.worker_id: one.filtered_by for one in decision.candidates}
    assert reasons == {"w1": "stale", "w2": ""}
    assert fleet.app.table.get(fleet.workers["w1"].address).is_reachable


async def test_a_draining_worker_is_not_picked(fleet: Fleet) -> None:
    """From its next report on, which comes at once."""
    await fleet.start("w1", "w2")
    fleet.publishers["w1"].store(HASHES)
    await eventually(lambda: fleet.goes_to("w1", 40))
    await fleet.workers["w1"].worker.Drain(DrainRequest(), None)
    await eventually(lambda: fleet.goes_to("w2", 0))


async def test_ready_means_somebody_may_be_picked(fleet: Fleet) -> None:
    """Without a worker the router says so, to probes and to callers; it is no error of its own."""
    await fleet.start("w1")

    def probe() -> int:
        url = f"http://127.0.0.1:{fleet.app.metrics_port}/ready"
        try:
            with urllib.request.urlopen(url) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    assert await asyncio.to_thread(probe) == 200
    await fleet.workers["w1"].kill()
    await eventually(lambda: not fleet.app.lifecycle.is_ready)
    assert await asyncio.to_thread(probe) == 503
    with pytest.raises(NoReplica):
        await fleet.pick()


async def test_a_caller_that_vanishes_in_the_queue_leaves_nothing(fleet: Fleet) -> None:
    """Its connection breaks while it waits; the place and the load are free again."""
    await fleet.start("w1")
    client = SessionClient(f"127.0.0.1:{fleet.app.rpc.port}")
    calls = [await client.start(PICK) for _ in range(5)]
    for number, call in enumerate(calls):
        request = pb.PickRequest(request_id=str(number), model=MODEL, prompt_tokens=4000)
        call.send(pb.PickMessage(pick=request))
    await eventually(lambda: fleet.app.loads.num_requests() >= 1)
    await client.close()
    await eventually(lambda: fleet.app.loads.num_requests() == 0)
    assert (await fleet.pick()).replica.worker_id == "w1"
    await eventually(lambda: fleet.app.loads.num_requests() == 0)
