"""The running router with real parts: workers over gRPC, the cache index, Redis."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from headrace_common.clock import SystemClock
from headrace_common.errors import NoReplica
from headrace_common.lifecycle import cancel_and_wait
from headrace_common.rpc import Call, method_ref
from headrace_common.session import SessionClient
from headrace_contracts.router.v1 import router_pb2 as pb
from headrace_contracts.worker.v1.worker_pb2 import (
    DescribeRequest,
    DescribeResponse,
    DrainRequest,
    LoadReport,
)
from headrace_router.app import DESCRIPTOR, RouterApp
from headrace_router.replicas import MAX_REPORT_AGE_S
from headrace_router.settings import RouterSettings
from headrace_testing.fake_worker import MODEL, FakeWorker
from headrace_testing.router_fleet import HASHES, PICK, Router, RouterFleet, pick_request
from headrace_testing.servers import LocalServer
from headrace_testing.waiting import eventually, free_port

WATCH = method_ref(DESCRIPTOR, "WatchReplicas", pb.WatchReplicasRequest, pb.ReplicaList)


class _SlowToDescribe(FakeWorker):
    """A worker on a busy machine."""

    async def Describe(  # noqa: N802 - contract name
        self, request: DescribeRequest, call: Call
    ) -> DescribeResponse:
        await asyncio.sleep(0.3)
        return await super().Describe(request, call)


@pytest.fixture
async def fleet(own_redis: LocalServer) -> AsyncIterator[RouterFleet]:
    async with AsyncExitStack() as stack:
        yield RouterFleet(own_redis, stack)


async def test_a_prompt_goes_where_its_prefix_is(fleet: RouterFleet) -> None:
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


async def test_a_router_that_listens_knows_its_workers(fleet: RouterFleet) -> None:
    """Gateways do without a router that is away; one that knows nobody would refuse."""
    fleet.worker_class = _SlowToDescribe
    await fleet.start_worker("w1", 1)
    workers = f"{fleet.workers['w1'].address},127.0.0.1:{free_port()}"
    app = RouterApp(RouterSettings(redis_url=fleet.url, workers=workers), SystemClock())
    await app.start()
    router = Router(app)
    try:
        assert (await router.pick()).replica.worker_id == "w1"
    finally:
        await router.stop()


async def test_a_router_without_any_worker_serves_soon(
    fleet: RouterFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so, rather than letting everybody wait for a worker that is not there."""
    monkeypatch.setattr("headrace_router.app._FIRST_LOOK_S", 60.0)
    workers = f"127.0.0.1:{free_port()}"
    app = RouterApp(RouterSettings(redis_url=fleet.url, workers=workers), SystemClock())
    async with asyncio.timeout(20):
        await app.start()
    router = Router(app)
    try:
        with pytest.raises(NoReplica):
            await router.pick()
    finally:
        await router.stop()


async def test_the_index_survives_its_own_restart(fleet: RouterFleet) -> None:
    """While it is down the router goes on with what it knows; afterwards it learns again."""
    await fleet.start("w1", "w2")
    fleet.publishers["w1"].store(HASHES[:30])
    await eventually(lambda: fleet.goes_to("w1", 30))
    await fleet.stop_index()
    fleet.publishers["w1"].store(HASHES[30:])
    assert await fleet.goes_to("w1", 30)
    await fleet.start_index()
    await eventually(lambda: fleet.goes_to("w1", 40))


async def test_a_flush_of_redis_is_repaired_by_snapshots(fleet: RouterFleet) -> None:
    """The data is gone: publishers are asked, and the decision is as before."""
    await fleet.start("w1", "w2")
    fleet.publishers["w1"].store(HASHES)
    await eventually(lambda: fleet.goes_to("w1", 40))
    fleet.publishers["w1"].asked.clear()
    await fleet.flush_redis()
    await eventually(lambda: fleet.publishers["w1"].asked == ["snapshot_wanted"])
    await eventually(lambda: fleet.goes_to("w1", 40))


async def test_without_redis_picks_go_on(fleet: RouterFleet) -> None:
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
    await eventually(lambda: fleet.goes_to("w1", 40))


async def test_a_restarted_worker_starts_empty(fleet: RouterFleet) -> None:
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


async def test_a_killed_worker_is_not_picked_from_then_on(fleet: RouterFleet) -> None:
    """However tempting its prefix is."""
    await fleet.start("w1", "w2")
    fleet.publishers["w1"].store(HASHES)
    await eventually(lambda: fleet.goes_to("w1", 40))
    await fleet.workers["w1"].kill()
    address = fleet.workers["w1"].address
    await eventually(lambda: not fleet.app.table.get(address).is_reachable)
    for _ in range(10):
        assert (await fleet.pick(HASHES)).replica.worker_id == "w2"


class FreezingWorker(FakeWorker):
    """Reports until it is frozen; then its streams stay open and silent, until it goes on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def WatchLoad(self, request, call) -> AsyncIterator[LoadReport]:  # noqa: N802 - contract name
        async for report in super().WatchLoad(request, call):
            await self.goes_on.wait()
            yield report


async def test_a_frozen_worker_is_not_picked(fleet: RouterFleet) -> None:
    """Its connection lives, but its reports have stopped: two seconds are enough."""
    fleet.worker_class = FreezingWorker
    await fleet.start("w1", "w2")
    fleet.publishers["w1"].store(HASHES)
    await eventually(lambda: fleet.goes_to("w1", 40))
    fleet.workers["w1"].worker.goes_on.clear()

    async def is_stale() -> bool:
        candidates = (await fleet.pick(HASHES)).candidates
        return any(one.filtered_by == "stale" for one in candidates)

    await eventually(is_stale)
    for _ in range(10):
        decision = await fleet.pick(HASHES)
        assert decision.replica.worker_id == "w2"
    reasons = {one.replica.worker_id: one.filtered_by for one in decision.candidates}
    assert reasons == {"w1": "stale", "w2": ""}
    assert fleet.app.table.get(fleet.workers["w1"].address).is_reachable


async def test_a_frozen_worker_is_told_as_out_of_reach_until_it_goes_on(fleet: RouterFleet) -> None:
    """Picks leave it out: who reads the list knows whom to wait for."""
    fleet.worker_class = FreezingWorker
    await fleet.start("w1", "w2")
    told: dict[str, bool] = {}

    async def follow() -> None:
        async for listed in fleet.client.stream(WATCH, pb.WatchReplicasRequest()):
            told.update({one.replica.worker_id: one.reachable for one in listed.replicas})

    following = asyncio.create_task(follow())
    await eventually(lambda: told == {"w1": True, "w2": True})
    fleet.workers["w2"].worker.goes_on.clear()
    await eventually(lambda: told == {"w1": True, "w2": False})
    fleet.workers["w2"].worker.goes_on.set()
    await eventually(lambda: told == {"w1": True, "w2": True})
    await cancel_and_wait(following)


async def test_a_router_that_stood_still_takes_no_worker_for_frozen(fleet: RouterFleet) -> None:
    """What they reported meanwhile has not been read when the next pick is made."""
    await fleet.start("w1", "w2")
    for _ in range(3):
        time.sleep(MAX_REPORT_AGE_S + 0.5)  # noqa: ASYNC251 - that the loop stands still is the point
        assert (await fleet.pick()).replica.worker_id in {"w1", "w2"}
        await asyncio.sleep(0.5)


async def test_a_draining_worker_is_not_picked(fleet: RouterFleet) -> None:
    """From its next report on, which comes at once."""
    await fleet.start("w1", "w2")
    fleet.publishers["w1"].store(HASHES)
    await eventually(lambda: fleet.goes_to("w1", 40))
    await fleet.workers["w1"].worker.Drain(DrainRequest(), None)
    await eventually(lambda: fleet.goes_to("w2", 0))


async def test_ready_means_somebody_may_be_picked(fleet: RouterFleet) -> None:
    """Without a worker the router says so, to probes and to callers; it is no error of its own."""
    await fleet.start("w1")

    ready = fleet.routers[0].ready
    assert await asyncio.to_thread(ready) == (200, {"status": "ready", "index_warm": True})
    (model,) = fleet.app.table.all()[0].models
    serving = fleet.app.metrics.ready_replicas.labels(model)._value
    assert serving.get() == 1
    await fleet.workers["w1"].kill()
    await eventually(lambda: not fleet.app.lifecycle.is_ready)
    assert (await asyncio.to_thread(ready))[0] == 503
    # The series stays: an alert on an absent one could not name the model.
    assert serving.get() == 0
    with pytest.raises(NoReplica):
        await fleet.pick()


async def test_a_caller_that_vanishes_in_the_queue_leaves_nothing(fleet: RouterFleet) -> None:
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


async def test_a_router_routes_before_it_has_read_the_index(fleet: RouterFleet) -> None:
    """Started while Redis does not answer it goes by load; warm is another state than ready."""
    await fleet.start("w1", "w2", num_routers=0)
    fleet.publishers["w1"].store(HASHES)
    await eventually(lambda: fleet.publishers["w1"].is_caught_up)
    fleet.redis.freeze()
    try:
        router = await fleet.start_router()
        assert await asyncio.to_thread(router.ready) == (
            200,
            {"status": "ready", "index_warm": False},
        )
        assert await router.nobody_has_it()
    finally:
        fleet.redis.thaw()
    await eventually(lambda: router.goes_to("w1", 40))
    # One replica is read before the others.
    await eventually(lambda: router.app.feed.is_warm)
    assert (await asyncio.to_thread(router.ready))[1]["index_warm"]


class SilentWorker(FakeWorker):
    """Describes itself and never tells its load."""

    async def WatchLoad(self, request, call) -> AsyncIterator[LoadReport]:  # noqa: N802 - contract name
        await asyncio.Event().wait()
        yield LoadReport()


async def test_a_replica_is_told_as_reachable_only_when_it_may_be_picked(
    fleet: RouterFleet,
) -> None:
    """Gateways let all who wait for one ask at that moment."""
    await fleet.start("w1", "w2")
    address = fleet.workers["w2"].address
    await fleet.workers["w2"].kill()
    fleet.worker_class = SilentWorker
    await fleet.start_worker("w2", 2, address)

    def is_described() -> bool:
        replica = fleet.app.table.get(address)
        return replica.is_reachable and replica.key.incarnation == 2

    await eventually(is_described)
    watch = fleet.client.stream(WATCH, pb.WatchReplicasRequest())
    told = {one.replica.worker_id: one.reachable for one in (await anext(watch)).replicas}
    assert told == {"w1": True, "w2": False}
    await watch.aclose()


async def test_a_stop_waits_for_picks_and_not_for_watchers(fleet: RouterFleet) -> None:
    """Gateways watch as long as they can: that would use up the whole grace."""
    await fleet.start("w1")
    watch = fleet.client.stream(WATCH, pb.WatchReplicasRequest())
    assert (await anext(watch)).replicas
    async with await fleet.client.start(PICK, timeout_s=20) as call:
        call.send(pb.PickMessage(pick=pick_request(HASHES)))
        assert await call.receive() is not None
        stopping = asyncio.create_task(fleet.app.stop(200))
        async with asyncio.timeout(30):
            async for _ in watch:
                pass
        assert not stopping.done()
    async with asyncio.timeout(30):
        await stopping
