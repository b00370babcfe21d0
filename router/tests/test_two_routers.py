"""Two running routers over one Redis: they see one another's decisions."""

import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack

import pytest

from headrace_common.kv_index import IndexKeys
from headrace_common.redis_client import background_client
from headrace_contracts.router.v1 import router_pb2 as pb
from headrace_contracts.router.v1.bookings_pb2 import Booking, BookingNews
from headrace_contracts.types.v1.types_pb2 import ReplicaRef
from headrace_testing.router_fleet import HASHES, PICK, Router, RouterFleet, pick_request
from headrace_testing.servers import LocalServer
from headrace_testing.waiting import eventually


@pytest.fixture
async def fleet(own_redis: LocalServer) -> AsyncIterator[RouterFleet]:
    async with AsyncExitStack() as stack:
        yield RouterFleet(own_redis, stack)


async def hold(router: Router, calls: AsyncExitStack) -> pb.Decision:
    """Pick and keep the replica until *calls* is closed."""
    call = await calls.enter_async_context(await router.client.start(PICK, timeout_s=20))
    call.send(pb.PickMessage(pick=pick_request(HASHES)))
    decision = await call.receive()
    assert decision is not None
    return decision


async def test_each_router_counts_the_decisions_of_the_other(fleet: RouterFleet) -> None:
    """From the decision on, before any worker reports it, and until its end."""
    await fleet.start("w1", "w2", "w3", "w4", num_routers=2)
    a, b = fleet.routers
    await eventually(lambda: a.app.bookings.exchange.num_peers() == 1)

    tokens = pick_request().prompt_tokens
    async with AsyncExitStack() as calls:
        for router in (a, b, a, b):
            await hold(router, calls)
        for router in (a, b):
            await eventually(lambda router=router: sums_to(loads(router), 4 * tokens))
    for router in (a, b):
        await eventually(lambda router=router: sums_to(loads(router), 0))


async def loads(router: Router) -> list[int]:
    decision = await router.pick()
    return [one.load_tokens for one in decision.candidates]


async def sums_to(loads: Awaitable[list[int]], total: int) -> bool:
    return sum(await loads) == total


async def test_a_cold_prefix_is_computed_once_by_two_routers(fleet: RouterFleet) -> None:
    """Blocks on their way through one router count as cached in the other."""
    await fleet.start("w1", "w2", "w3", "w4", num_routers=2)
    a, b = fleet.routers

    async def sees_it() -> bool:
        decision = await b.pick(HASHES)
        hits = {one.replica.worker_id: one.hit_blocks for one in decision.candidates}
        return hits[first.replica.worker_id] == len(HASHES) and sum(hits.values()) == len(HASHES)

    async with AsyncExitStack() as calls:
        first = await hold(a, calls)
        await eventually(sees_it)


async def test_requests_that_wait_in_both_are_bid_for_and_served(fleet: RouterFleet) -> None:
    """One replica, busy: when it opens both routers bid for it, and nobody is lost."""
    await fleet.start("w1", num_routers=2)
    a, b = fleet.routers
    for router in (a, b):
        await eventually(lambda router=router: router.app.bookings.exchange.num_peers() == 1)
    request = pick_request()
    request.prompt_tokens = 5000
    async with AsyncExitStack() as calls:
        opened = [
            await calls.enter_async_context(await router.client.start(PICK, timeout_s=20))
            for router in (a, a, b)
        ]
        opened[0].send(pb.PickMessage(pick=request))
        await opened[0].receive()
        await eventually(lambda: b.app.bookings.exchange.num_peer_bookings() == 1)
        for call in opened[1:]:
            call.send(pb.PickMessage(pick=request))
        opened[0].send(pb.PickMessage(progress=pb.PickProgress(first_token=True, ttft_s=1.0)))
        for call in opened[1:]:
            assert (await call.receive()) is not None
        for router in (a, b):
            assert router.app.bookings.exchange.bids.is_contested(is_queueing=False)


async def test_a_router_that_dies_is_forgotten(fleet: RouterFleet) -> None:
    """What it had booked does not weigh on a replica for ever."""
    await fleet.start("w1", "w2")
    exchange = fleet.app.bookings.exchange
    ref = ReplicaRef(worker_id="w1", incarnation=1)
    booked = [Booking(id=1, replica=ref, uncached_tokens=50_000, tokens=50_000)]
    async with background_client(fleet.url) as redis:
        news = BookingNews(router_id="dead", booked=booked)
        await redis.publish(IndexKeys().bookings, b"\xff not a message")
        await redis.publish(IndexKeys().bookings, news.SerializeToString())
    await eventually(lambda: exchange.num_peer_bookings() == 1)
    assert await sums_to(loads(fleet.routers[0]), 50_000)
    await eventually(lambda: exchange.num_peer_bookings() == 0)
    assert await sums_to(loads(fleet.routers[0]), 0)


async def test_no_decision_waits_for_redis(fleet: RouterFleet) -> None:
    """Frozen or gone, routers decide alone, and find one another again."""
    await fleet.start("w1", "w2", num_routers=2)
    a, b = fleet.routers
    await eventually(lambda: a.app.bookings.exchange.num_peers() == 1)
    fleet.redis.freeze()
    started = time.monotonic()
    for _ in range(10):
        await a.pick(HASHES)
    # Less than what one question to a frozen Redis may take.
    assert time.monotonic() - started < 5
    fleet.redis.kill()
    await eventually(lambda: a.app.bookings.exchange.num_peers() == 0, within_s=8)
    await a.pick(HASHES)
    fleet.redis.start()
    await eventually(lambda: a.app.bookings.exchange.num_peers() == 1)
    await eventually(lambda: b.app.bookings.exchange.num_peers() == 1)
