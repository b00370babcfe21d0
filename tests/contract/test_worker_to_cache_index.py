"""What a worker publishes, the real cache-index keeps: same blocks, also after it restarts."""

import asyncio
import contextlib

import pytest

from headrace_cache_index.app import CacheIndexApp
from headrace_cache_index.settings import CacheIndexSettings
from headrace_common.blocks import chain, chain_key, join
from headrace_common.clock import SystemClock
from headrace_common.metrics import new_registry
from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_contracts.cache_index.v1 import cache_index_pb2 as index_pb
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_testing.tiny_model import write_hf_folder
from headrace_testing.waiting import eventually, free_port
from headrace_worker.app import WorkerApp
from headrace_worker.settings import WorkerSettings

pytestmark = pytest.mark.redis

GENERATE = method_ref(
    pb.DESCRIPTOR.services_by_name["Worker"], "Generate", pb.GenerateRequest, pb.GenerateEvent
)
LOOKUP = method_ref(
    index_pb.DESCRIPTOR.services_by_name["CacheIndex"],
    "Lookup",
    index_pb.LookupRequest,
    index_pb.LookupResponse,
)


@contextlib.asynccontextmanager
async def cache_index(redis_url, port):
    app = CacheIndexApp(
        CacheIndexSettings.load(redis_url=redis_url, listen=f"127.0.0.1:{port}"), SystemClock()
    )
    await app.start()
    client = SessionClient(f"127.0.0.1:{port}")
    try:
        yield client
    finally:
        await client.close()
        await app.stop()


@contextlib.asynccontextmanager
async def worker(folder, index_port, *, kv_capacity_tokens=4096):
    write_hf_folder(folder)
    settings = WorkerSettings.load(
        model_path=folder,
        model_name="tiny",
        cache_dir=folder,
        cache_index_address=f"127.0.0.1:{index_port}",
        kv_capacity_tokens=kv_capacity_tokens,
        drain_grace_s=0,
    )
    app = WorkerApp(settings, SystemClock(), new_registry())
    try:
        await app.start()
        client = SessionClient(f"127.0.0.1:{app.port}")
        yield app, client
        await client.close()
    finally:
        await app.stop()


async def generate(client, prompt):
    request = pb.GenerateRequest(
        request_id="r",
        model="tiny",
        prompt_token_ids=prompt,
        cache_salt=b"tenant",
        stopping=pb.Stopping(max_tokens=1),
    )
    return [event async for event in client.stream(GENERATE, request)]


async def blocks_found(index, app, prompt):
    """Leading blocks of *prompt* that the index says the worker holds."""
    key = chain_key(app.state.served.info.fingerprint, "", b"tenant")
    request = index_pb.LookupRequest(model="tiny", block_hashes=join(chain(key, prompt)))
    found = await index.unary(LOOKUP, request, timeout_s=5)
    return {hit.replica.incarnation: hit.blocks for hit in found.hits}.get(
        app.replica.incarnation, 0
    )


async def test_the_index_knows_what_the_worker_computed(tmp_path, redis_db_url):
    """A prompt's full blocks are found; evicted ones are not."""
    port = free_port()
    first, second = [10] * 64, [11] * 64
    async with (
        cache_index(redis_db_url, port) as index,
        worker(tmp_path, port, kv_capacity_tokens=96) as (app, client),
    ):
        await generate(client, first)
        await eventually(lambda: _is(blocks_found(index, app, first), 4))
        assert await blocks_found(index, app, second) == 0
        await generate(client, second)
        await eventually(lambda: _is(blocks_found(index, app, second), 4))
        assert await blocks_found(index, app, first) < 4


async def test_the_index_restarts_and_catches_up(tmp_path, redis_db_url):
    """What happened while the index was away is known soon after it is back."""
    port = free_port()
    before, during, after = [10] * 40, [11] * 40, [12] * 40
    async with worker(tmp_path, port) as (app, client):
        async with cache_index(redis_db_url, port) as index:
            await generate(client, before)
            await eventually(lambda: _is(blocks_found(index, app, before), 2))
        await generate(client, during)
        async with cache_index(redis_db_url, port) as index:
            await generate(client, after)
            for prompt in (before, during, after):
                await eventually(lambda p=prompt: _is(blocks_found(index, app, p), 2))


async def test_the_index_loses_its_store_and_gets_a_snapshot(tmp_path, own_redis):
    """Redis comes back empty: the worker's blocks are in it again."""
    port, url = free_port(), f"redis://127.0.0.1:{own_redis.port}/0"
    prompt = [10] * 40
    async with worker(tmp_path, port) as (app, client):
        async with cache_index(url, port) as index:
            await generate(client, prompt)
            await eventually(lambda: _is(blocks_found(index, app, prompt), 2))
        own_redis.kill()
        await asyncio.to_thread(own_redis.start)
        async with cache_index(url, port) as index:
            await eventually(lambda: _is(blocks_found(index, app, prompt), 2))


async def _is(found, expected):
    return await found == expected
