"""Tests of the lean connection to Redis."""

from __future__ import annotations

import asyncio

import hiredis
import pytest
import redis

from headrace_common.redis_pipeline import RedisPipeline, RefusedError
from headrace_testing.servers import LocalServer
from headrace_testing.waiting import eventually, free_port

pytestmark = pytest.mark.redis


async def test_replies_come_in_order_and_errors_are_values(redis_db_url: str) -> None:
    """A failed command fails alone; the URL's database is the one that is written to."""
    pipeline = await RedisPipeline.connect(redis_db_url)
    replies = await pipeline.send(
        [["SET", "a", 1], ["INCR", "a"], ["LPUSH", "a", "x"], ["GET", b"a"], ["MGET", "a", "b"]]
    )
    assert isinstance(replies[2], hiredis.ReplyError)
    del replies[2]
    assert replies == [b"OK", 2, b"2", [b"2", None]]
    pipeline.close()
    with redis.Redis.from_url(redis_db_url) as client:
        assert client.get("a") == b"2"


async def test_batches_under_way_together_get_their_own_replies(redis_db_url: str) -> None:
    """Also when somebody in the middle has stopped waiting."""
    pipeline = await RedisPipeline.connect(redis_db_url)
    batches = [pipeline.send([["SET", "n", n], ["GET", "n"]]) for n in range(5)]
    batches[2].cancel()
    replies = await asyncio.gather(*(it for it in batches if not it.cancelled()))
    assert replies == [[b"OK", b"%d" % n] for n in (0, 1, 3, 4)]
    pipeline.close()


async def test_a_batch_that_cannot_be_sent_takes_nobodys_replies(redis_db_url: str) -> None:
    """It fails alone, at once."""
    pipeline = await RedisPipeline.connect(redis_db_url)
    with pytest.raises(UnicodeEncodeError):
        pipeline.send([["SET", "a", "\ud800"]])
    async with asyncio.timeout(30):
        assert await pipeline.send([["ECHO", "mine"]]) == [b"mine"]
    pipeline.close()


async def test_a_large_reply_in_many_pieces_is_one_reply(redis_db_url: str) -> None:
    """What the network cuts is put together."""
    pipeline = await RedisPipeline.connect(redis_db_url)
    value = b"x" * 5_000_000
    await pipeline.send([["SET", "big", value]])
    assert await pipeline.send([["GET", "big"], ["PING"]]) == [value, b"PONG"]
    pipeline.close()


async def test_a_password_is_given_and_a_wrong_one_is_refused(own_redis: LocalServer) -> None:
    """Names what Redis says; no half-open connection stays."""
    with redis.Redis(port=own_redis.port) as client:
        client.config_set("requirepass", "right")
    pipeline = await RedisPipeline.connect(f"redis://:right@127.0.0.1:{own_redis.port}/3")
    assert await pipeline.send([["PING"]]) == [b"PONG"]
    pipeline.close()
    with pytest.raises(RefusedError, match=r"WRONGPASS|invalid"):
        await RedisPipeline.connect(f"redis://:wrong@127.0.0.1:{own_redis.port}/0")


async def test_a_lost_connection_is_told_once_and_fails_what_waits(own_redis: LocalServer) -> None:
    """Also when nobody waits; our own closing is not a loss."""
    losses: list[Exception] = []
    url = f"redis://127.0.0.1:{own_redis.port}/0"
    closed = await RedisPipeline.connect(url, losses.append)
    closed.close()
    pipeline = await RedisPipeline.connect(url, losses.append)
    waiting = pipeline.send([["BLPOP", "nothing", 0]])
    await asyncio.sleep(0)
    own_redis.kill()
    with pytest.raises(ConnectionError):
        await waiting
    await eventually(lambda: len(losses) == 1)
    with pytest.raises(ConnectionError):
        pipeline.send([["PING"]])


async def test_nobody_there_is_an_os_error() -> None:
    """As for any connection."""
    with pytest.raises(ConnectionError):
        await RedisPipeline.connect(f"redis://127.0.0.1:{free_port()}/0")
