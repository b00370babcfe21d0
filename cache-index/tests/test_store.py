"""The Redis store against its oracle in memory, and what only Redis can do."""

import asyncio
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from headrace_cache_index.events import Change, Replacement
from headrace_cache_index.outcome import Status
from headrace_cache_index.store import Publisher, Store, StoreLimits
from headrace_common.errors import InvalidRequest, Unavailable
from headrace_common.kv_index import DELTA_FIELD, TIERS, IndexKeys, ReplicaKey, Tier
from headrace_common.redis_client import background_client
from headrace_contracts.cache_index.v1.cache_index_pb2 import IndexDelta
from headrace_contracts.types.v1.types_pb2 import CACHE_TIER_CPU, CACHE_TIER_GPU
from headrace_testing.memory_index import MemoryIndex
from headrace_testing.servers import LocalServer
from headrace_testing.waiting import eventually

KEYS = IndexKeys()


def short(*numbers: int) -> set[bytes]:
    return {number.to_bytes(8, "little") for number in numbers}


def add(seq: int, *numbers: int, tier: Tier = CACHE_TIER_GPU) -> Change:
    return Change(seq, added={tier: short(*numbers)})


async def held(redis: Redis, publisher: Publisher) -> dict[Tier, set[bytes]]:
    keys = {tier: KEYS.blocks(publisher.model, publisher.replica, tier) for tier in TIERS}
    sets = {tier: set(await redis.smembers(key)) for tier, key in keys.items()}
    return {tier: blocks for tier, blocks in sets.items() if blocks}


async def deltas(redis: Redis) -> list[IndexDelta]:
    return [IndexDelta.FromString(row[DELTA_FIELD]) for _, row in await redis.xrange(KEYS.deltas)]


async def test_set_stream_and_registry_change_together(
    store: Store, redis: Redis, publisher: Publisher
) -> None:
    """One batch leaves its blocks, its delta and its number."""
    assert (await store.register(publisher)).status is Status.NEW
    change = Change(1, added={CACHE_TIER_GPU: short(1, 2), CACHE_TIER_CPU: short(3)})
    assert await store.apply(publisher, [change]) == (Status.APPLIED, 1)
    assert await held(redis, publisher) == {CACHE_TIER_GPU: short(1, 2), CACHE_TIER_CPU: short(3)}
    seen = await deltas(redis)
    assert [(d.seq, d.tier, len(d.added)) for d in seen] == [(1, 1, 16), (1, 2, 8)]
    entry = (await store.registry())["w1"]
    assert (entry.incarnation, entry.seq, entry.model) == (7, 1, "m")


async def test_a_batch_out_of_sequence_changes_nothing(
    store: Store, redis: Redis, publisher: Publisher
) -> None:
    """Gaps and duplicates leave sets and stream alone."""
    await store.register(publisher)
    await store.apply(publisher, [add(1, 1)])
    assert await store.apply(publisher, [add(3, 3)]) == (Status.GAP, 1)
    assert await store.apply(publisher, [add(1, 9)]) == (Status.APPLIED, 1)
    assert await held(redis, publisher) == {CACHE_TIER_GPU: short(1)}
    assert len(await deltas(redis)) == 1


async def test_a_store_that_forgot_its_scripts_is_taught_again(
    store: Store, redis: Redis, publisher: Publisher
) -> None:
    """A restarted Redis knows no script; batches are applied all the same."""
    await store.register(publisher)
    await redis.script_flush()
    assert await store.apply(publisher, [add(1, 1), add(2, 2)]) == (Status.APPLIED, 2)
    assert await held(redis, publisher) == {CACHE_TIER_GPU: short(1, 2)}


async def test_a_failed_batch_stops_those_behind_it(store: Store, publisher: Publisher) -> None:
    """In one pipeline nothing behind a gap is applied."""
    await store.register(publisher)
    assert await store.apply(publisher, [add(2, 2), add(3, 3)]) == (Status.GAP, 0)
    assert await store.num_blocks("m", publisher.replica) == 0


async def test_a_batch_without_changes_still_moves_the_number_on(
    store: Store, redis: Redis, publisher: Publisher
) -> None:
    """Mirrors must not take an empty batch for a lost one."""
    await store.register(publisher)
    await store.apply(publisher, [Change(1), add(2, 1)])
    assert [d.seq for d in await deltas(redis)] == [1, 2]


async def test_a_new_incarnation_drops_the_old_ones_blocks(store: Store, redis: Redis) -> None:
    """A restarted worker starts empty, and mirrors are told."""
    old = Publisher(ReplicaKey("w1", 7), "m", 100)
    new = Publisher(ReplicaKey("w1", 8), "m2", 100)
    await store.register(old)
    await store.apply(old, [add(1, 1)])
    assert (await store.register(new)).status is Status.NEW
    assert await held(redis, old) == {}
    last = (await deltas(redis))[-1]
    assert (last.dropped, last.replica.incarnation, last.model) == (True, 7, "m")
    assert await store.apply(old, [add(2, 2)]) == (Status.SUPERSEDED, 0)
    assert (await store.register(old)).status is Status.SUPERSEDED


async def test_an_incarnation_keeps_its_model(store: Store, publisher: Publisher) -> None:
    """A second model under the same incarnation would write to other keys."""
    await store.register(publisher)
    with pytest.raises(InvalidRequest):
        await store.register(Publisher(publisher.replica, "other", 100))


async def test_more_blocks_than_the_capacity_are_dropped(store: Store, redis: Redis) -> None:
    """Memory stays bounded: an impossible set is emptied and asked for anew."""
    small = Publisher(ReplicaKey("w1", 1), "m", 3)
    await store.register(small)
    await store.apply(small, [add(1, 1, 2, 3)])
    assert await store.apply(small, [add(2, 4)]) == (Status.OVERFLOW, 2)
    assert await held(redis, small) == {}
    assert (await deltas(redis))[-1].cleared


async def test_a_snapshot_takes_the_place_of_everything(
    store: Store, redis: Redis, publisher: Publisher
) -> None:
    """Old blocks go, on all tiers, and mirrors are told to read again."""
    await store.register(publisher)
    await store.apply(publisher, [add(1, 1), add(2, 2, tier=CACHE_TIER_CPU)])
    whole = Replacement(9, {CACHE_TIER_GPU: short(5, 6)})
    assert await store.replace(publisher, whole) == (Status.APPLIED, 9)
    assert await held(redis, publisher) == {CACHE_TIER_GPU: short(5, 6)}
    last = (await deltas(redis))[-1]
    assert (last.reset, last.seq) == (True, 9)
    assert not [key async for key in redis.scan_iter("*staged*")]


async def test_blocks_have_a_life_of_their_own(redis: Redis, publisher: Publisher) -> None:
    """Without any renewal Redis itself forgets them; a renewal prolongs it."""
    limits = StoreLimits(lease_s=1, blocks_ttl_s=60, max_stream_len=1000)
    store = Store(redis, KEYS, limits)
    await store.register(publisher)
    await store.apply(publisher, [add(1, 1)])
    key = KEYS.blocks("m", publisher.replica, CACHE_TIER_GPU)
    assert 0 < await redis.pttl(key) <= 60_000
    await redis.pexpire(key, 5_000)
    await store.renew(publisher)
    assert await redis.pttl(key) > 50_000


async def test_only_an_ended_lease_is_dropped(redis: Redis, publisher: Publisher) -> None:
    """The script looks at the lease again, so a renewal in between wins."""
    store = Store(redis, KEYS, StoreLimits(lease_s=0.2, blocks_ttl_s=60, max_stream_len=1000))
    await store.register(publisher)
    await store.apply(publisher, [add(1, 1)])
    assert not await store.drop_expired(publisher.replica, "m")
    await eventually(lambda: store.drop_expired(publisher.replica, "m"))
    assert await store.registry() == {}
    assert await held(redis, publisher) == {}
    assert (await deltas(redis))[-1].dropped


async def test_a_store_that_lost_its_data_says_so(
    store: Store, redis: Redis, publisher: Publisher
) -> None:
    """After a flush neither batches nor renewals pretend."""
    await store.register(publisher)
    await redis.flushdb()
    assert await store.apply(publisher, [add(1, 1)]) == (Status.LOST, 0)
    assert await store.renew(publisher) == (Status.LOST, 0)


async def test_the_stream_is_capped(redis: Redis, publisher: Publisher) -> None:
    """Old changes go; sets and registry stay whole."""
    store = Store(redis, KEYS, StoreLimits(lease_s=5, blocks_ttl_s=60, max_stream_len=100))
    await store.register(publisher)
    for start in range(1, 1001, 50):
        await store.apply(publisher, [add(seq, 1) for seq in range(start, start + 50)])
    assert await redis.xlen(KEYS.deltas) < 300
    assert (await store.registry())["w1"].seq == 1000


async def test_thousands_of_blocks_in_one_batch(store: Store, publisher: Publisher) -> None:
    """A batch larger than a Lua stack goes in whole."""
    big = Publisher(publisher.replica, "m", 100_000)
    await store.register(big)
    await store.apply(big, [add(1, *range(30_000))])
    assert await store.num_blocks("m", big.replica) == 30_000


async def test_a_store_that_is_down_is_unavailable(
    own_redis: LocalServer, publisher: Publisher
) -> None:
    """Every failure of the connection is one error that callers retry on."""
    client = background_client(f"redis://127.0.0.1:{own_redis.port}/0", timeout_s=0.5)
    store = Store(client, KEYS, StoreLimits(lease_s=5, blocks_ttl_s=60, max_stream_len=100))
    await store.ping()
    own_redis.kill()
    with pytest.raises(Unavailable):
        await store.register(publisher)
    with pytest.raises(Unavailable):
        await store.apply(publisher, [add(1, 1)])
    await client.aclose()


numbers = st.sets(st.integers(0, 9), max_size=4)
changes = st.builds(
    lambda cleared, added, removed, tier: Change(
        0, cleared, {tier: short(*added)}, {tier: short(*(removed - added))}
    ),
    st.booleans(),
    numbers,
    numbers,
    st.sampled_from(TIERS),
)
tiers_of_numbers = st.dictionaries(st.sampled_from(TIERS), numbers)
steps = st.one_of(
    st.tuples(st.just("apply"), st.integers(0, 2), changes),
    st.tuples(st.just("replace"), st.integers(0, 5), tiers_of_numbers),
    st.tuples(st.just("register"), st.integers(0, 1), st.none()),
    st.tuples(st.just("flush"), st.just(0), st.none()),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=st.lists(steps, max_size=12))
def test_redis_and_memory_agree(redis_url: str, script: list[tuple[str, int, object]]) -> None:
    """Every outcome and every set is what the plain dicts say."""
    asyncio.run(agree(redis_url, script))


async def agree(redis_url: str, script: list[tuple[str, int, object]]) -> None:
    redis = background_client(redis_url.removesuffix("/0") + "/10")
    await redis.flushdb()
    store = Store(redis, KEYS, StoreLimits(lease_s=60, blocks_ttl_s=60, max_stream_len=1000))
    oracle, life, seq = MemoryIndex(), 1, 0
    publisher = Publisher(ReplicaKey("w1", life), "m", 8)
    for kind, number, argument in script:
        match kind:
            case "register":
                life += number
                publisher = Publisher(ReplicaKey("w1", life), "m", 8)
                got = await store.register(publisher)
                want = oracle.register(publisher.replica, "m", 8)
                seq = want.seq
            case "apply":
                assert isinstance(argument, Change)
                argument.seq = max(1, seq + number)
                got = await store.apply(publisher, [argument])
                want = oracle.apply(publisher.replica, argument)
            case "replace":
                assert isinstance(argument, dict)
                blocks = {tier: short(*ids) for tier, ids in argument.items()}
                got = await store.replace(publisher, Replacement(seq + number, blocks))
                want = oracle.replace(publisher.replica, Replacement(seq + number, blocks))
            case _:
                await redis.flushdb()
                oracle.forget_all()
                continue
        assert got.status is want.status
        if want.status is not Status.SUPERSEDED:
            assert got == want
            seq = want.seq
        assert await held(redis, publisher) == oracle.blocks(publisher.replica)
    await redis.flushdb()
    await redis.aclose()


async def test_a_writer_ends_whenever_it_is_cancelled(store: Store, publisher: Publisher) -> None:
    """A cancellation that comes while a command is being sent is not lost in the client."""
    await store.register(publisher)
    random = Random(3)

    async def busy() -> None:
        while True:
            await store.renew(publisher)
            await store.ping()

    for _ in range(60):
        task = asyncio.create_task(busy())
        await asyncio.sleep(random.random() * 0.01)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=2)
        assert done == {task}
        assert task.cancelled()


async def test_all_replicas_together_are_bounded(redis: Redis) -> None:
    """Each may hold an equal share; one that holds more, also since others came, starts over."""
    limits = StoreLimits(lease_s=5, blocks_ttl_s=60, max_stream_len=1000, max_total_blocks=10)
    store = Store(redis, KEYS, limits)
    first, second = (Publisher(ReplicaKey(name, 1), "m", 100) for name in ("w1", "w2"))
    await store.register(first)
    assert await store.limit_blocks(first) == 10
    assert (await store.apply(first, [add(1, *range(10))])).status is Status.APPLIED
    await store.register(second)
    assert await store.limit_blocks(second) == 5
    assert (await store.apply(second, [add(1, *range(5))])).status is Status.APPLIED
    assert await store.apply(second, [add(2, 5)]) == (Status.OVERFLOW, 2)
    assert await store.num_blocks("m", second.replica) == 0
    assert await store.apply(first, [Change(2)]) == (Status.OVERFLOW, 2)
