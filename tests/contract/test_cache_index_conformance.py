"""The CacheIndex contract, against the real service on a real Redis and against its fake."""

from collections.abc import AsyncIterator

import pytest

from headrace_cache_index.app import CacheIndexApp
from headrace_cache_index.settings import CacheIndexSettings
from headrace_common.blocks import chain, chain_key, join
from headrace_common.clock import SystemClock
from headrace_common.errors import InvalidRequest
from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_common.session_call import SessionCall
from headrace_contracts.cache_index.v1 import cache_index_pb2 as pb
from headrace_contracts.types.v1.types_pb2 import CACHE_TIER_CPU, ReplicaRef
from headrace_testing.fake_cache_index import DESCRIPTOR, FakeCacheIndexServer
from headrace_testing.fake_publisher import FINGERPRINT, PUBLISH, batch, hello, removed, stored

LOOKUP = method_ref(DESCRIPTOR, "Lookup", pb.LookupRequest, pb.LookupResponse)
STATS = method_ref(DESCRIPTOR, "GetStats", pb.GetStatsRequest, pb.GetStatsResponse)
HASHES = chain(chain_key(FINGERPRINT), list(range(16 * 6)))
W1 = ReplicaRef(worker_id="w1", incarnation=5)
W1_LATER = ReplicaRef(worker_id="w1", incarnation=6)
W2 = ReplicaRef(worker_id="w2", incarnation=5)
Publishing = SessionCall[pb.PublishMessage, pb.PublishReply]


@pytest.fixture(params=["real", "fake"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[SessionClient]:
    if request.param == "fake":
        async with FakeCacheIndexServer() as server:
            client = SessionClient(server.address)
            yield client
            await client.close()
        return
    url = request.getfixturevalue("redis_db_url")
    app = CacheIndexApp(CacheIndexSettings(redis_url=url), SystemClock())
    await app.start()
    client = SessionClient(f"127.0.0.1:{app.rpc.port}")
    yield client
    await client.close()
    await app.stop()


async def say(call: Publishing, *messages: pb.PublishMessage) -> pb.PublishReply:
    """Send messages and return the next reply."""
    for message in messages:
        call.send(message)
    reply = await call.receive()
    assert reply is not None
    return reply


async def until_acknowledged(call: Publishing, seq: int) -> None:
    """Read replies up to the acknowledgement of *seq*."""
    while (reply := await call.receive()) is not None:
        assert reply.WhichOneof("kind") == "acknowledged_seq"
        if reply.acknowledged_seq == seq:
            return
    raise AssertionError("the stream ended")


async def hits(client: SessionClient, hashes: list[bytes], model: str = "m") -> dict[str, int]:
    request = pb.LookupRequest(model=model, block_hashes=join(hashes))
    response = await client.unary(LOOKUP, request, timeout_s=5)
    return {hit.replica.worker_id: hit.blocks for hit in response.hits}


async def stats(client: SessionClient) -> dict[str, pb.GetStatsResponse.ReplicaStats]:
    response = await client.unary(STATS, pb.GetStatsRequest(), timeout_s=5)
    return {one.replica.worker_id: one for one in response.replicas}


async def test_stored_blocks_are_found(client: SessionClient) -> None:
    """Leading blocks count, per replica of the model, up to the first one missing."""
    async with await client.start(PUBLISH) as one, await client.start(PUBLISH) as two:
        assert (await say(one, hello(W1))).acknowledged_seq == 0
        assert (await say(two, hello(W2))).acknowledged_seq == 0
        one.send(batch(1, stored(HASHES[:3])))
        two.send(batch(1, stored([HASHES[0], HASHES[2]])))
        await until_acknowledged(one, 1)
        await until_acknowledged(two, 1)
        assert await hits(client, HASHES) == {"w1": 3, "w2": 1}
        assert await hits(client, HASHES, model="other") == {}


async def test_removed_and_cleared_blocks_are_gone(client: SessionClient) -> None:
    """A removal takes the block out, twice is once, and a clear takes all."""
    async with await client.start(PUBLISH) as call:
        await say(call, hello(W1))
        call.send(batch(1, stored(HASHES), removed(HASHES[4:])))
        call.send(batch(2, removed(HASHES[4:])))
        await until_acknowledged(call, 2)
        assert await hits(client, HASHES) == {"w1": 4}
        call.send(batch(3, pb.KvEvent(cleared=pb.AllCleared()), stored(HASHES[:1])))
        await until_acknowledged(call, 3)
        assert await hits(client, HASHES) == {"w1": 1}


async def test_tiers_are_kept_apart(client: SessionClient) -> None:
    """A block that left one tier may still be held on another."""
    async with await client.start(PUBLISH) as call:
        await say(call, hello(W1))
        call.send(batch(1, stored(HASHES[:3]), stored(HASHES[:3], CACHE_TIER_CPU)))
        call.send(batch(2, removed(HASHES[1:3])))
        await until_acknowledged(call, 2)
        request = pb.LookupRequest(model="m", block_hashes=join(HASHES))
        (hit,) = (await client.unary(LOOKUP, request, timeout_s=5)).hits
        assert (hit.blocks, hit.gpu_blocks) == (3, 1)


async def test_a_gap_is_replayed(client: SessionClient) -> None:
    """A missing batch is asked for by number; the late ones count once it is here."""
    async with await client.start(PUBLISH) as call:
        await say(call, hello(W1))
        call.send(batch(1, stored(HASHES[:1])))
        await until_acknowledged(call, 1)
        assert (await say(call, batch(3, stored(HASHES[2:3])))).replay_from_seq == 2
        call.send(batch(2, stored(HASHES[1:2])))
        call.send(batch(3, stored(HASHES[2:3])))
        await until_acknowledged(call, 3)
        assert await hits(client, HASHES) == {"w1": 3}
        assert (await stats(client))["w1"].num_gaps == 1


async def test_a_doubled_batch_counts_once(client: SessionClient) -> None:
    """An old number never undoes what came after it."""
    async with await client.start(PUBLISH) as call:
        await say(call, hello(W1))
        first = batch(1, stored(HASHES[:2]))
        call.send(first)
        call.send(batch(2, removed(HASHES[:2])))
        await until_acknowledged(call, 2)
        assert (await say(call, first)).acknowledged_seq == 2
        assert await hits(client, HASHES) == {"w1": 0}


async def test_an_unknown_publisher_in_mid_life_is_asked_for_a_snapshot(
    client: SessionClient,
) -> None:
    """Without a base, batches are useless; the snapshot's parts make one."""
    async with await client.start(PUBLISH) as call:
        assert (await say(call, hello(W1, next_seq=9))).snapshot_wanted
        for idx in range(3):
            whole = pb.BlocksStored(block_hashes=HASHES[idx], tier=CACHE_TIER_CPU)
            part = pb.Snapshot(as_of_seq=8, blocks=[whole], last=idx == 2)
            call.send(pb.PublishMessage(snapshot=part))
        await until_acknowledged(call, 8)
        call.send(batch(9, stored(HASHES[3:4])))
        await until_acknowledged(call, 9)
        assert await hits(client, HASHES) == {"w1": 4}


async def test_a_publisher_may_come_back(client: SessionClient) -> None:
    """After a broken stream the same incarnation goes on where it was, or replays."""
    async with await client.start(PUBLISH) as call:
        await say(call, hello(W1))
        call.send(batch(1, stored(HASHES[:2])))
        await until_acknowledged(call, 1)
    async with await client.start(PUBLISH) as call:
        assert (await say(call, hello(W1, next_seq=2))).acknowledged_seq == 1
    async with await client.start(PUBLISH) as call:
        assert (await say(call, hello(W1, next_seq=4))).replay_from_seq == 2
        assert await hits(client, HASHES) == {"w1": 2}


async def test_a_new_incarnation_starts_empty(client: SessionClient) -> None:
    """A restarted worker has lost its cache, and the older life may not come back."""
    async with await client.start(PUBLISH) as call:
        await say(call, hello(W1))
        call.send(batch(1, stored(HASHES)))
        await until_acknowledged(call, 1)
    async with await client.start(PUBLISH) as call:
        assert (await say(call, hello(W1_LATER))).acknowledged_seq == 0
        assert await hits(client, HASHES) == {"w1": 0}
    async with await client.start(PUBLISH) as call:
        with pytest.raises(InvalidRequest):
            await say(call, hello(W1, next_seq=2))


async def test_foreign_hashes_are_refused(client: SessionClient) -> None:
    """A recipe that differs in anything ends the stream, loudly."""
    for field, value in (
        ("self_test", b"x" * 16),
        ("algorithm", "md5/1"),
        ("model_fingerprint", "another"),
        ("block_size_tokens", 0),
    ):
        greeting = hello(W1)
        setattr(greeting.hello.recipe, field, value)
        async with await client.start(PUBLISH) as call:
            with pytest.raises(InvalidRequest):
                await say(call, greeting)
    assert await stats(client) == {}


CUT = pb.KvEvent(stored=pb.BlocksStored(block_hashes=b"cut", tier=1))


@pytest.mark.parametrize("event", [stored(HASHES, tier=0), CUT, pb.KvEvent()])
async def test_a_batch_that_cannot_be_read_is_made_good_by_a_snapshot(
    client: SessionClient, event: pb.KvEvent
) -> None:
    """No tier, cut hashes, a kind that only a newer worker knows: it would come again for ever."""
    async with await client.start(PUBLISH) as call:
        await say(call, hello(W1))
        call.send(batch(1, stored(HASHES[:3])))
        await until_acknowledged(call, 1)
        assert (await say(call, batch(2, event))).snapshot_wanted
        whole = pb.Snapshot(as_of_seq=2, blocks=[stored(HASHES[:2]).stored], last=True)
        call.send(pb.PublishMessage(snapshot=whole))
        await until_acknowledged(call, 2)
        call.send(batch(3, stored(HASHES[2:4])))
        await until_acknowledged(call, 3)
        assert await hits(client, HASHES) == {"w1": 4}


async def test_malformed_streams_are_refused(client: SessionClient) -> None:
    """No Hello, a second Hello, a snapshot of cut hashes."""
    async with await client.start(PUBLISH) as call:
        with pytest.raises(InvalidRequest):
            await say(call, batch(1))
    cut = pb.PublishMessage(snapshot=pb.Snapshot(as_of_seq=1, blocks=[CUT.stored], last=True))
    for wrong in (hello(W1), cut):
        async with await client.start(PUBLISH) as call:
            await say(call, hello(W1))
            with pytest.raises(InvalidRequest):
                await say(call, wrong)
    with pytest.raises(InvalidRequest):
        await client.unary(LOOKUP, pb.LookupRequest(model="m", block_hashes=b"cut"), timeout_s=5)


async def test_stats_tell_size_and_connection(client: SessionClient) -> None:
    """What an operator asks first."""
    async with await client.start(PUBLISH) as call:
        await say(call, hello(W1))
        call.send(batch(1, stored(HASHES)))
        await until_acknowledged(call, 1)
        one = (await stats(client))["w1"]
        assert (one.num_blocks, one.last_seq, one.connected) == (len(HASHES), 1, True)
        assert one.replica == W1
