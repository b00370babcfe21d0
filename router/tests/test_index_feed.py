"""The mirror fed from a real Redis, beside the writer that fills it in production."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from headrace_cache_index.events import Change, Replacement
from headrace_cache_index.store import Publisher, Store, StoreLimits
from headrace_common.clock import SystemClock
from headrace_common.kv_index import DELTA_FIELD, TIERS, IndexKeys, ReplicaKey
from headrace_common.lifecycle import cancel_and_wait, supervise
from headrace_common.redis_client import background_client
from headrace_contracts.cache_index.v1.cache_index_pb2 import IndexDelta
from headrace_router.index_feed import IndexFeed
from headrace_router.metrics import RouterMetrics
from headrace_router.mirror import PrefixMirror
from headrace_testing.memory_index import MemoryIndex
from headrace_testing.servers import LocalServer
from headrace_testing.waiting import eventually

KEYS = IndexKeys()
LIMITS = StoreLimits(lease_s=60, blocks_ttl_s=600, max_stream_len=1000)
A = Publisher(ReplicaKey("a", 1), "m", 1000)
B = Publisher(ReplicaKey("b", 1), "m", 1000)
A_AGAIN = Publisher(ReplicaKey("a", 2), "m", 1000)


def short(*numbers: int) -> set[bytes]:
    return {number.to_bytes(8, "little") for number in numbers}


def add(seq: int, *numbers: int) -> Change:
    return Change(seq, added={TIERS[0]: short(*numbers)})


@dataclass
class Following:
    """A feed that runs, its mirror and its metrics."""

    feed: IndexFeed
    mirror: PrefixMirror
    metrics: RouterMetrics

    def rescans(self, reason: str) -> float:
        return self.metrics.index_rescans.labels(reason)._value.get()


def make_feed(redis: Redis, audit_interval_s: float = 0.05) -> Following:
    mirror, metrics = PrefixMirror(), RouterMetrics(CollectorRegistry())
    feed = IndexFeed(redis, KEYS, mirror, SystemClock(), metrics, audit_interval_s)
    return Following(feed, mirror, metrics)


@pytest.fixture
async def redis(own_redis: LocalServer) -> AsyncIterator[Redis]:
    client = background_client(f"redis://127.0.0.1:{own_redis.port}/0", timeout_s=1)
    yield client
    await client.aclose()


@pytest.fixture
def store(redis: Redis) -> Store:
    return Store(redis, KEYS, LIMITS)


@pytest.fixture
async def following(own_redis: LocalServer) -> AsyncIterator[Following]:
    client = background_client(f"redis://127.0.0.1:{own_redis.port}/0", timeout_s=1)
    following = make_feed(client)
    task = asyncio.create_task(supervise("feed", following.feed.follow, max_delay_s=0.2))
    yield following
    await cancel_and_wait(task)
    await client.aclose()


async def test_reads_what_was_there_and_follows_what_comes(store: Store, following) -> None:
    """A router that starts late knows as much as one that was there from the start."""
    await store.register(A)
    await store.apply(A, [add(1, 1, 2)])
    await eventually(lambda: following.mirror.depths([1, 2, 3]) == {A.replica: 2})
    await store.register(B)
    await store.apply(B, [add(1, 1, 2, 3)])
    await eventually(lambda: following.mirror.depths([1, 2, 3]) == {A.replica: 2, B.replica: 3})
    assert following.feed.is_warm
    assert following.rescans("gap") == 0


async def test_a_new_incarnation_starts_empty(store: Store, following) -> None:
    """The former life's blocks are gone from the mirror."""
    await store.register(A)
    await store.apply(A, [add(1, 1)])
    await eventually(lambda: following.mirror.depths([1]) == {A.replica: 1})
    await store.register(A_AGAIN)
    await eventually(lambda: following.mirror.depths([1]) == {})
    await store.apply(A_AGAIN, [add(1, 1)])
    await eventually(lambda: following.mirror.depths([1]) == {A_AGAIN.replica: 1})


async def test_a_snapshot_is_read_from_the_sets(store: Store, following) -> None:
    """The stream only says that it came."""
    await store.register(A)
    await store.apply(A, [add(1, 1)])
    await eventually(lambda: following.mirror.depths([1]) == {A.replica: 1})
    await store.replace(A, Replacement(9, {TIERS[1]: short(5, 6)}))
    await eventually(lambda: following.mirror.depths([5, 6]) == {A.replica: 2})
    assert following.mirror.depths([1]) == {}
    assert following.rescans("reset") == 1


async def test_a_lost_change_is_found(store: Store, redis: Redis, own_redis) -> None:
    """A hole in the stream shows at the next change: that replica alone is read again."""
    following = make_feed(redis, audit_interval_s=3600)
    await store.register(A)
    await store.apply(A, [add(1, 1)])
    await following.feed._read_everything()
    await store.apply(A, [add(2, 2)])
    ((lost, _),) = await redis.xrevrange(KEYS.deltas, count=1)
    await redis.xdel(KEYS.deltas, lost)
    await store.apply(A, [add(3, 3)])
    await following.feed._read_changes()
    assert following.mirror.depths([1, 2, 3]) == {A.replica: 3}
    assert following.rescans("gap") == 1


async def test_what_cannot_be_read_is_passed_over(
    store: Store, redis: Redis, following: Following
) -> None:
    """Garbage in the stream or the registry stops nobody; whose change it was is read anew."""
    await store.register(A)
    await store.apply(A, [add(1, 1)])
    await eventually(lambda: following.mirror.depths([1]) == {A.replica: 1})
    ref = A.replica.to_ref()
    half = IndexDelta(replica=ref, seq=2, model="m", tier=TIERS[0], added=b"123")
    strange = IndexDelta(replica=ref, seq=3, model="m", tier=77, added=b"12345678")  # type: ignore[arg-type]  # on purpose
    for garbage in (b"\xff\xff\xff", half.SerializeToString(), strange.SerializeToString()):
        await redis.xadd(KEYS.deltas, {DELTA_FIELD: garbage})
    await redis.xadd(KEYS.deltas, {"other": b"x"})
    await redis.hset(KEYS.registry, "stranger", "\udcff".encode(errors="surrogateescape"))
    await store.apply(A, [add(2, 2)])
    await eventually(lambda: following.mirror.depths([1, 2]) == {A.replica: 2})
    assert following.rescans("malformed") >= 1


async def test_what_is_no_hash_in_a_set_is_passed_over(
    store: Store, redis: Redis, following
) -> None:
    """Read whole, one foreign member of a set would hold up everything behind it, for ever."""
    await store.register(A)
    await redis.sadd(KEYS.blocks(A.model, A.replica, TIERS[0]), b"foreign")
    await store.apply(A, [add(1, 1, 2)])
    await redis.delete(KEYS.deltas)
    await store.register(B)
    await store.apply(B, [add(1, 1)])
    await eventually(lambda: following.mirror.depths([1, 2]) == {A.replica: 2, B.replica: 1})
    assert following.metrics.index_failures._value.get() >= 1


async def test_silent_drift_is_found(store: Store, redis: Redis, following) -> None:
    """What no change tells, the comparison of sizes does."""
    await store.register(A)
    await store.apply(A, [add(1, 1, 2)])
    await eventually(lambda: following.mirror.depths([1, 2]) == {A.replica: 2})
    await redis.srem(KEYS.blocks("m", A.replica, TIERS[0]), *short(2))
    await eventually(lambda: following.mirror.depths([1, 2]) == {A.replica: 1})
    assert following.rescans("drift") >= 1


async def test_lost_data_is_forgotten_and_new_data_learned(
    store: Store, redis: Redis, following
) -> None:
    """After a flush nobody holds anything, until snapshots say otherwise."""
    await store.register(A)
    await store.apply(A, [add(1, 1)])
    await eventually(lambda: following.mirror.depths([1]) == {A.replica: 1})
    await redis.flushall()
    await eventually(lambda: following.mirror.depths([1]) == {})
    await store.register(A)
    await store.replace(A, Replacement(4, {TIERS[0]: short(1, 2)}))
    await store.apply(A, [add(5, 3)])
    await eventually(lambda: following.mirror.depths([1, 2, 3]) == {A.replica: 3})


async def test_without_redis_the_mirror_goes_on(
    store: Store, own_redis: LocalServer, following
) -> None:
    """It says how old it is, and catches up when Redis is back, even empty."""
    await store.register(A)
    await store.apply(A, [add(1, 1)])
    await eventually(lambda: following.mirror.depths([1]) == {A.replica: 1})
    own_redis.kill()
    await eventually(lambda: following.feed.staleness_s() > 0.5)
    assert following.mirror.depths([1]) == {A.replica: 1}
    own_redis.start()
    await eventually(lambda: following.feed.staleness_s() < 0.5)
    await eventually(lambda: following.mirror.depths([1]) == {})


async def test_a_trimmed_stream_is_survived(redis: Redis, own_redis: LocalServer) -> None:
    """Away for longer than the stream is kept: gaps lead to the sets, which are whole."""
    small = Store(redis, KEYS, StoreLimits(lease_s=60, blocks_ttl_s=600, max_stream_len=50))
    following = make_feed(redis, audit_interval_s=0)
    await small.register(A)
    await small.register(B)
    await small.apply(A, [add(1, 1)])
    await small.apply(B, [add(1, 1)])
    await following.feed._read_everything()
    await small.apply(A, [add(2, 2)])
    for start in range(2, 902, 50):
        await small.apply(B, [add(seq, seq) for seq in range(start, start + 50)])
    assert await redis.xlen(KEYS.deltas) < 300
    for _ in range(4):
        if await following.feed._read_changes():
            await following.feed._audit()
    assert following.mirror.depths([1, 2]) == {A.replica: 2, B.replica: 2}
    assert following.mirror.replicas()[B.replica].num_blocks == 901


KINDS = ["apply", "replace", "restart", "lose", "double", "read", "flush"]
numbers = st.sets(st.integers(1, 9), max_size=4)
step = st.tuples(
    st.sampled_from(KINDS), st.sampled_from(["a", "b"]), numbers, numbers, st.booleans()
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=st.lists(step, max_size=25))
def test_mirror_and_oracle_agree_once_it_is_quiet(redis_url: str, script: list) -> None:
    """Changes lost from the stream, doubled in it, or gone with all data: the end is the same."""
    asyncio.run(converge(redis_url.removesuffix("/0") + "/11", script))


async def converge(url: str, script: list) -> None:
    redis = background_client(url)
    await redis.flushdb()
    world = World(redis)
    await world.following.feed._read_everything()
    for name in world.lives:
        await world.register(name)
    for kind, name, added, removed, cleared in script:
        await getattr(world, kind)(name, added, removed, cleared)
    for _ in range(3):
        await world.following.feed._read_changes(block_ms=None)
        await world.following.feed._audit()
    for block in range(1, 10):
        chain = [block.to_bytes(8, "little")]
        held = world.oracle.leading_blocks("m", chain)
        want = {key: 1 for key, depth in held.items() if depth}
        assert world.following.mirror.depths([block]) == want
    await redis.flushdb()
    await redis.aclose()


class World:
    """The writer, its oracle and a mirror; one method per thing that may happen."""

    def __init__(self, redis: Redis) -> None:
        self.redis, self.store, self.oracle = redis, Store(redis, KEYS, LIMITS), MemoryIndex()
        self.following = make_feed(redis)
        self.lives = {"a": A, "b": B}
        self.seq = {"a": 0, "b": 0}

    async def register(self, name: str) -> None:
        await self.store.register(self.lives[name])
        self.oracle.register(self.lives[name].replica, "m", 1000)
        self.seq[name] = 0

    async def apply(self, name, added, removed, cleared) -> None:
        self.seq[name] += 1
        gone = {TIERS[0]: short(*(removed - added))}
        change = Change(self.seq[name], cleared, {TIERS[0]: short(*added)}, gone)
        await self.store.apply(self.lives[name], [change])
        self.oracle.apply(self.lives[name].replica, change)

    async def replace(self, name, added, removed, _cleared) -> None:
        self.seq[name] += 3
        blocks = {TIERS[0]: short(*added), TIERS[2]: short(*removed)}
        whole = Replacement(self.seq[name], blocks)
        await self.store.replace(self.lives[name], whole)
        self.oracle.replace(self.lives[name].replica, whole)

    async def restart(self, name, *_unused) -> None:
        replica = self.lives[name].replica
        later = replica._replace(incarnation=replica.incarnation + 1)
        self.lives[name] = Publisher(later, "m", 1000)
        await self.register(name)

    async def lose(self, *_unused) -> None:
        for stream_id, _ in await self.redis.xrevrange(KEYS.deltas, count=2):
            await self.redis.xdel(KEYS.deltas, stream_id)

    async def double(self, *_unused) -> None:
        for _, fields in await self.redis.xrevrange(KEYS.deltas, count=1):
            await self.redis.xadd(KEYS.deltas, fields)

    async def read(self, *_unused) -> None:
        await self.following.feed._read_changes(block_ms=None)

    async def flush(self, *_unused) -> None:
        await self.redis.flushdb()
        self.oracle.forget_all()
        for name in self.lives:
            await self.register(name)


async def test_a_feed_ends_whenever_it_is_cancelled(own_redis: LocalServer) -> None:
    """A cancellation that comes while a command is being sent is not lost in the client."""
    client = background_client(f"redis://127.0.0.1:{own_redis.port}/0")
    random = Random(3)
    for _ in range(60):
        following = make_feed(client)
        task = asyncio.create_task(busy(following.feed))
        await asyncio.sleep(random.random() * 0.01)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=2)
        assert done == {task}
        assert task.cancelled()
    await client.aclose()


async def busy(feed: IndexFeed) -> None:
    """Read as `follow` does, but more often."""
    while True:
        await feed._read_changes(block_ms=1)
