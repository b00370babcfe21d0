"""What the cache index's tests share."""

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from headrace_cache_index.store import Publisher, Store, StoreLimits
from headrace_common.kv_index import IndexKeys, ReplicaKey
from headrace_common.redis_client import background_client


@pytest.fixture
async def redis(redis_db_url: str) -> AsyncIterator[Redis]:
    client = background_client(redis_db_url)
    await client.flushdb()
    yield client
    await client.aclose()


@pytest.fixture
def store(redis: Redis) -> Store:
    return Store(redis, IndexKeys(), StoreLimits(lease_s=5, blocks_ttl_s=60, max_stream_len=1000))


@pytest.fixture
def publisher() -> Publisher:
    return Publisher(ReplicaKey("w1", 7), "m", 100)
