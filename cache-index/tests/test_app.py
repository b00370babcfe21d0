"""The running service with a publisher that behaves as workers do."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from redis.asyncio import Redis

from headrace_cache_index.app import CacheIndexApp
from headrace_cache_index.settings import CacheIndexSettings
from headrace_common.blocks import chain, chain_key
from headrace_common.clock import SystemClock
from headrace_common.kv_index import IndexKeys, RegistryEntry, ReplicaKey
from headrace_common.redis_client import background_client
from headrace_contracts.types.v1.types_pb2 import CACHE_TIER_GPU, ReplicaRef
from headrace_testing.fake_publisher import FakePublisher
from headrace_testing.servers import LocalServer
from headrace_testing.waiting import eventually, free_port
from headrace_testing.web import fetch

W1 = ReplicaRef(worker_id="w1", incarnation=5)
HASHES = chain(chain_key("any"), list(range(16 * 8)))
KEY = IndexKeys().blocks("m", ReplicaKey.of(W1), CACHE_TIER_GPU)


class Parts:
    """Starts services and publishers; the fixture stops them, also after a failed assertion."""

    def __init__(self, redis_url: str, stack: AsyncExitStack) -> None:
        self._redis_url, self._stack = redis_url, stack

    async def app(self, port: int = 0, lease_s: float = 1.2) -> CacheIndexApp:
        settings = CacheIndexSettings(
            redis_url=self._redis_url, lease_s=lease_s, listen=f"127.0.0.1:{port}"
        )
        app = CacheIndexApp(settings, SystemClock())
        self._stack.push_async_callback(app.stop)
        await app.start()
        return app

    def publisher(self, port: int) -> FakePublisher:
        publisher = FakePublisher(f"127.0.0.1:{port}", W1)
        self._stack.push_async_callback(publisher.close)
        return publisher


@pytest.fixture
async def parts(request: pytest.FixtureRequest) -> AsyncIterator[Parts]:
    port = free_port()
    if "own_redis" in request.fixturenames:
        port = request.getfixturevalue("own_redis").port
    async with AsyncExitStack() as stack:
        yield Parts(f"redis://127.0.0.1:{port}/0", stack)


@pytest.fixture
async def redis(own_redis: LocalServer) -> AsyncIterator[Redis]:
    client = background_client(f"redis://127.0.0.1:{own_redis.port}/0", timeout_s=1)
    yield client
    await client.aclose()


async def holds_the_truth(redis: Redis, publisher: FakePublisher) -> bool:
    members = await redis.smembers(KEY)
    return publisher.is_caught_up and members == {block[:8] for block in publisher.held}


async def test_after_a_flush_the_index_asks_for_snapshots(
    own_redis: LocalServer, redis: Redis, parts: Parts
) -> None:
    """Redis lost its data while the publisher was idle: within a lease all is back."""
    app = await parts.app()
    publisher = parts.publisher(app.rpc.port)
    publisher.store(HASHES[:5])
    await eventually(lambda: holds_the_truth(redis, publisher))
    publisher.asked.clear()
    await redis.flushall()
    await eventually(lambda: holds_the_truth(redis, publisher))
    assert publisher.asked == ["snapshot_wanted"]
    publisher.store(HASHES[5:])
    await eventually(lambda: holds_the_truth(redis, publisher))


async def test_while_redis_is_down_nothing_is_acknowledged(
    own_redis: LocalServer, redis: Redis, parts: Parts
) -> None:
    """Batches wait, are not lost, and after Redis's restart the index is whole again."""
    app = await parts.app()
    publisher = parts.publisher(app.rpc.port)
    publisher.store(HASHES[:2])
    await eventually(lambda: publisher.is_caught_up)
    own_redis.kill()
    publisher.store(HASHES[2:4])
    publisher.remove(HASHES[:1])
    await eventually(lambda: not app.lifecycle.is_ready)
    assert publisher.acknowledged_seq == 1
    own_redis.start()
    await eventually(lambda: holds_the_truth(redis, publisher))
    await eventually(lambda: app.lifecycle.is_ready)


async def test_says_once_what_is_wrong_with_redis(
    own_redis: LocalServer, redis: Redis, parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where it never worked, such as a wrong password: the reason is not to be guessed."""
    await redis.config_set("requirepass", "secret")
    try:
        app = await parts.app()
        await eventually(lambda: "already authenticated" in caplog.text)
        assert not app.lifecycle.is_ready
        failures = app._metrics.store_failures
        await eventually(lambda: failures._value.get() >= 3)
        assert caplog.text.count("nothing is acknowledged") == 1
    finally:
        await redis.config_set("requirepass", "")
    await eventually(lambda: app.lifecycle.is_ready)


async def test_a_restart_of_the_service_loses_nothing(
    own_redis: LocalServer, redis: Redis, parts: Parts
) -> None:
    """Publishers come back and only send what is missing; no snapshot is needed."""
    port = free_port()
    app = await parts.app(port, lease_s=20)
    publisher = parts.publisher(port)
    publisher.store(HASHES[:3])
    await eventually(lambda: publisher.is_caught_up)
    await app.stop()
    publisher.asked.clear()
    publisher.store(HASHES[3:6])
    app = await parts.app(port, lease_s=20)
    await eventually(lambda: holds_the_truth(redis, publisher))
    assert "snapshot_wanted" not in publisher.asked


async def test_a_publisher_that_stays_away_is_swept(
    own_redis: LocalServer, redis: Redis, parts: Parts
) -> None:
    """Connected, the lease is renewed past its length; gone, the replica vanishes."""
    app = await parts.app(lease_s=0.4)
    publisher = parts.publisher(app.rpc.port)
    publisher.store(HASHES[:3])
    await eventually(lambda: publisher.is_caught_up)

    async def lease_end_ms() -> int:
        text = await redis.hget(IndexKeys().registry, W1.worker_id)
        return RegistryEntry.decode(text).lease_unix_ms

    # A first lease that was never renewed would have ended twice by then.
    first_ms = await lease_end_ms()
    await eventually(lambda: _is_after(lease_end_ms, first_ms + 1000))
    assert await holds_the_truth(redis, publisher)
    await publisher.close()

    async def is_gone() -> bool:
        return not await redis.exists(KEY) and not await redis.hlen(IndexKeys().registry)

    await eventually(is_gone)


async def _is_after(end_ms: Callable[[], Awaitable[int]], wanted_ms: int) -> bool:
    return await end_ms() > wanted_ms


async def test_many_batches_are_written_and_bounded(
    own_redis: LocalServer, redis: Redis, parts: Parts
) -> None:
    """A burst far above the inbox and with Redis away in between ends in the truth."""
    app = await parts.app(lease_s=20)
    publisher = parts.publisher(app.rpc.port)
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


async def test_starts_without_redis_and_says_so(parts: Parts) -> None:
    """A dependency that is down at start makes the service not ready, not dead."""
    app = await parts.app()
    url = f"http://127.0.0.1:{app.metrics_port}/ready"
    assert (await asyncio.to_thread(fetch, url))[0] == 503


async def test_stopping_is_prompt_while_redis_is_down(own_redis: LocalServer, parts: Parts) -> None:
    """A publisher that waits for the store and a failing check do not hold up the stop."""
    app = await parts.app()
    publisher = parts.publisher(app.rpc.port)
    publisher.store(HASHES[:1])
    await eventually(lambda: publisher.is_caught_up)
    own_redis.kill()
    publisher.store(HASHES[1:2])
    await eventually(lambda: not app.lifecycle.is_ready)
    async with asyncio.timeout(10):
        await app.stop()


def test_a_wrong_engines_file_is_told_as_a_wrong_setting(tmp_path: Path) -> None:
    """In a sentence, with the code that says that another try is no use."""
    done = subprocess.run(
        [sys.executable, "-m", "headrace_cache_index"],
        env={**os.environ, "HEADRACE_CACHE_INDEX_ENGINES_FILE": str(tmp_path / "none.toml")},
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2
    assert "cache-index: engines file" in done.stderr
    assert "Traceback" not in done.stderr
