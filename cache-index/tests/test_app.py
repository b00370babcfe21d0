"""The running service with a publisher that behaves as workers do."""

import asyncio
import urllib.error
import urllib.request
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from headrace_cache_index.app import CacheIndexApp
from headrace_cache_index.settings import CacheIndexSettings
from headrace_common.blocks import chain, chain_key
from headrace_common.clock import SystemClock
from headrace_common.kv_index import IndexKeys, ReplicaKey
from headrace_common.redis_client import background_client
from headrace_contracts.types.v1.types_pb2 import CACHE_TIER_GPU, ReplicaRef
from headrace_testing.fake_publisher import FakePublisher
from headrace_testing.servers import LocalServer
from headrace_testing.waiting import eventually, free_port

W1 = ReplicaRef(worker_id="w1", incarnation=5)
HASHES = chain(chain_key("any"), list(range(16 * 8)))
KEY = IndexKeys().blocks("m", ReplicaKey.of(W1), CACHE_TIER_GPU)


async def start_app(url: str, port: int = 0, lease_s: float = 1.2) -> CacheIndexApp:
    settings = CacheIndexSettings(redis_url=url, lease_s=lease_s, listen=f"127.0.0.1:{port}")
    app = CacheIndexApp(settings, SystemClock())
    await app.start()
    return app


@pytest.fixture
async def redis(own_redis: LocalServer) -> AsyncIterator[Redis]:
    client = background_client(f"redis://127.0.0.1:{own_redis.port}/0", timeout_s=1)
    yield client
    await client.aclose()


async def holds_the_truth(redis: Redis, publisher: FakePublisher) -> bool:
    members = await redis.smembers(KEY)
    return publisher.is_caught_up and members == {block[:8] for block in publisher.held}


async def test_after_a_flush_the_index_asks_for_snapshots(
    own_redis: LocalServer, redis: Redis
) -> None:
    """Redis lost its data while the publisher was idle: within a lease all is back."""
    app = await start_app(f"redis://127.0.0.1:{own_redis.port}/0")
    publisher = FakePublisher(f"127.0.0.1:{app.rpc.port}", W1)
    publisher.store(HASHES[:5])
    await eventually(lambda: holds_the_truth(redis, publisher))
    publisher.asked.clear()
    await redis.flushall()
    await eventually(lambda: holds_the_truth(redis, publisher))
    assert publisher.asked == ["snapshot_wanted"]
    publisher.store(HASHES[5:])
    await eventually(lambda: holds_the_truth(redis, publisher))
    await publisher.close()
    await app.stop()


async def test_while_redis_is_down_nothing_is_acknowledged(
    own_redis: LocalServer, redis: Redis
) -> None:
    """Batches wait, are not lost, and after Redis's restart the index is whole again."""
    app = await start_app(f"redis://127.0.0.1:{own_redis.port}/0")
    publisher = FakePublisher(f"127.0.0.1:{app.rpc.port}", W1)
    publisher.store(HASHES[:2])
    await eventually(lambda: publisher.is_caught_up)
    own_redis.kill()
    publisher.store(HASHES[2:4])
    publisher.remove(HASHES[:1])
    await eventually(lambda: not app.lifecycle.is_ready)
    assert publisher.acknowledged_seq == 1
    own_redis.start()
    await eventually(lambda: holds_the_truth(redis, publisher), within_s=10)
    assert app.lifecycle.is_ready
    await publisher.close()
    await app.stop()


async def test_a_restart_of_the_service_loses_nothing(own_redis: LocalServer, redis: Redis) -> None:
    """Publishers come back and only send what is missing; no snapshot is needed."""
    url, port = f"redis://127.0.0.1:{own_redis.port}/0", free_port()
    app = await start_app(url, port, lease_s=20)
    publisher = FakePublisher(f"127.0.0.1:{port}", W1)
    publisher.store(HASHES[:3])
    await eventually(lambda: publisher.is_caught_up)
    await app.stop()
    publisher.asked.clear()
    publisher.store(HASHES[3:6])
    app = await start_app(url, port, lease_s=20)
    await eventually(lambda: holds_the_truth(redis, publisher))
    assert "snapshot_wanted" not in publisher.asked
    await publisher.close()
    await app.stop()


async def test_a_publisher_that_stays_away_is_swept(own_redis: LocalServer, redis: Redis) -> None:
    """Connected, the lease is renewed past its length; gone, the replica vanishes."""
    app = await start_app(f"redis://127.0.0.1:{own_redis.port}/0", lease_s=0.4)
    publisher = FakePublisher(f"127.0.0.1:{app.rpc.port}", W1)
    publisher.store(HASHES[:3])
    await eventually(lambda: publisher.is_caught_up)
    await asyncio.sleep(1.0)
    assert await holds_the_truth(redis, publisher)
    await publisher.close()

    async def is_gone() -> bool:
        return not await redis.exists(KEY) and not await redis.hlen(IndexKeys().registry)

    await eventually(is_gone)
    await app.stop()


async def test_many_batches_are_written_and_bounded(own_redis: LocalServer, redis: Redis) -> None:
    """A burst far above the inbox and with Redis away in between ends in the truth."""
    app = await start_app(f"redis://127.0.0.1:{own_redis.port}/0", lease_s=20)
    publisher = FakePublisher(f"127.0.0.1:{app.rpc.port}", W1)
    publisher.store(HASHES[:1])
    await eventually(lambda: publisher.is_caught_up)
    own_redis.freeze()
    for round_idx in range(1500):
        publisher.store([HASHES[round_idx % 8]])
        publisher.remove([HASHES[(round_idx * 3) % 8]])
        await asyncio.sleep(0)
    own_redis.thaw()
    await eventually(lambda: holds_the_truth(redis, publisher), within_s=20)
    assert "replay_from_seq" in publisher.asked
    await publisher.close()
    await app.stop()


async def test_starts_without_redis_and_says_so() -> None:
    """A dependency that is down at start makes the service not ready, not dead."""
    app = await start_app(f"redis://127.0.0.1:{free_port()}/0")
    url = f"http://127.0.0.1:{app.metrics_port}/ready"
    with pytest.raises(urllib.error.HTTPError, match="503"):
        await asyncio.to_thread(urllib.request.urlopen, url)
    await app.stop()
