"""An engine's ZMQ sockets, read into a real store."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from headrace_cache_index.engine_feed import EngineFeed
from headrace_cache_index.engines_file import EngineEntry, load_engines_file
from headrace_cache_index.metrics import CacheIndexMetrics
from headrace_cache_index.store import Store, StoreLimits
from headrace_common.blocks import chain, chain_key
from headrace_common.errors import Unavailable
from headrace_common.kv_index import IndexKeys, ReplicaKey
from headrace_common.lifecycle import cancel_and_wait, supervise
from headrace_common.redis_client import background_client
from headrace_common.settings import SettingsError
from headrace_testing.fake_worker import FINGERPRINT, MODEL, FakeWorker, FakeWorkerServer
from headrace_testing.servers import LocalServer
from headrace_testing.waiting import eventually
from headrace_testing.zmq_engine import ZmqEngine, encode, removed, stored

TOKENS = list(range(16 * 8))
HASHES = [one[:8] for one in chain(chain_key(FINGERPRINT), TOKENS)]
W1 = ReplicaKey("w1", 1)


class Fed:
    """An engine, the worker before it, and the feed that reads it."""

    def __init__(self, store: Store, stack: AsyncExitStack) -> None:
        self.store, self._stack = store, stack
        self.metrics = CacheIndexMetrics(CollectorRegistry())

    async def start(self, *, num_kept: int = 100, has_replay: bool = True) -> ZmqEngine:
        self.engine = await self._stack.enter_async_context(ZmqEngine(num_kept))
        self.worker = FakeWorkerServer(FakeWorker("w1", 1))
        await self._stack.enter_async_context(self.worker)
        entry = EngineEntry(
            worker=self.worker.address,
            events=self.engine.events,
            replay=self.engine.replay if has_replay else None,
            topic="kv",
        )
        feed = EngineFeed(entry, self.store, self.metrics, renew_every_s=0.2, max_blocks=1000)
        task = asyncio.create_task(supervise("feed", feed.follow, max_delay_s=0.2))
        self._stack.push_async_callback(cancel_and_wait, task)
        return self.engine

    async def holds(self, count: int, replica: ReplicaKey = W1) -> bool:
        """Whether the index holds the first blocks of the known prompt, and nothing else."""
        gpu = (await self.store.membership(MODEL, replica, HASHES))[0]
        total = await self.store.num_blocks(MODEL, replica)
        return gpu == [idx < count for idx in range(len(HASHES))] and total == count

    async def listens(self) -> None:
        """Wait until live messages arrive: subscribing takes a moment."""
        await eventually(lambda: self.metrics.engines._value.get() == 1)
        await eventually(self.is_registered)
        await asyncio.sleep(0.2)

    async def is_registered(self) -> bool:
        return "w1" in await self.store.registry()

    @property
    def unreadable(self) -> float:
        return self.metrics.unreadable._value.get()

    @property
    def gaps(self) -> float:
        return self.metrics.engine_gaps._value.get()


def blocks(start: int, count: int) -> dict[str, object]:
    names: list[int | bytes] = list(range(start + 1, start + count + 1))
    tokens = TOKENS[start * 16 : (start + count) * 16]
    return stored(names, tokens, parent=start or None)


@pytest.fixture
async def fed(store: Store) -> AsyncIterator[Fed]:
    async with AsyncExitStack() as stack:
        yield Fed(store, stack)


async def test_what_came_before_is_replayed_and_what_comes_is_followed(fed: Fed) -> None:
    """From the engine's first message on, though the reader starts late."""
    engine = await fed.start()
    await engine.publish(blocks(0, 2))
    await eventually(lambda: fed.holds(2))
    await fed.listens()
    await engine.publish(blocks(2, 3))
    await eventually(lambda: fed.holds(5))
    await engine.publish(removed([5, 4]))
    await eventually(lambda: fed.holds(3))
    assert fed.gaps == 0


async def test_a_lost_message_is_replayed(fed: Fed) -> None:
    """The next one shows the gap."""
    engine = await fed.start()
    await engine.publish(blocks(0, 1))
    await fed.listens()
    await engine.publish(blocks(1, 1), lost=True)
    await engine.publish(blocks(2, 1))
    await eventually(lambda: fed.holds(3))
    assert fed.gaps == 1


async def test_a_gap_that_cannot_be_filled_costs_what_was_known(fed: Fed) -> None:
    """A removal may be among the lost: nothing older is believed any more."""
    engine = await fed.start(num_kept=1)
    await engine.publish(blocks(0, 3))
    await eventually(lambda: fed.holds(3))
    await fed.listens()
    await engine.publish(removed([3, 2]), lost=True)
    await engine.publish(blocks(0, 1))
    await eventually(lambda: fed.holds(1))


async def test_an_engine_without_replay_is_followed_from_now_on(fed: Fed) -> None:
    """And starts over at each gap."""
    engine = await fed.start(has_replay=False)
    await fed.listens()
    await engine.publish(blocks(0, 2))
    await eventually(lambda: fed.holds(2))
    await engine.publish(removed([2]), lost=True)
    await engine.publish(blocks(0, 1))
    await eventually(lambda: fed.holds(1))


UNREADABLE = [
    b"\xc1",
    encode([{"type": "BlockStored", "block_hashes": [1]}]),
    encode([stored([1], [-1] * 16)]),
    encode([stored([1, 2], [], block_size=0)]),
    encode([stored([1], [2**40] * 16)]),
    encode([removed([1], group_idx="x")]),
    msgspec.msgpack.encode({"events": [[]]}),
    b"\x91" * 5000,
]


@pytest.mark.parametrize("payload", UNREADABLE, ids=range(len(UNREADABLE)))
async def test_a_message_that_cannot_be_read_costs_what_was_known(fed: Fed, payload: bytes) -> None:
    """Live and in a later replay: the feed goes on behind it, without what it may have removed."""
    engine = await fed.start()
    await engine.publish(blocks(0, 3))
    await eventually(lambda: fed.holds(3))
    await fed.listens()
    await engine.publish_raw(payload)
    await eventually(lambda: fed.holds(0))
    await engine.publish(blocks(0, 2))
    await eventually(lambda: fed.holds(2))
    assert fed.unreadable == 1
    fed.worker.worker.incarnation = 2
    await eventually(lambda: fed.holds(2, ReplicaKey("w1", 2)))
    assert fed.unreadable == 2


async def test_a_message_of_another_shape_is_passed_over(fed: Fed) -> None:
    """It has no number, so nothing is missing behind it."""
    engine = await fed.start()
    await fed.listens()
    await engine.send_frames(b"x")
    await engine.send_frames(b"short", b"payload")
    await engine.publish(blocks(0, 2))
    await eventually(lambda: fed.holds(2))
    assert (fed.unreadable, fed.gaps) == (2, 0)


async def test_a_restarted_engine_starts_empty(fed: Fed) -> None:
    """Its numbers begin anew though the worker before it lives on."""
    engine = await fed.start()
    await engine.publish(blocks(0, 3))
    await fed.listens()
    await engine.publish(blocks(3, 1))
    await eventually(lambda: fed.holds(4))
    engine.restart()
    await engine.publish(blocks(0, 1))
    await eventually(lambda: fed.holds(1))


async def test_an_engine_that_restarts_after_the_replay_starts_empty(fed: Fed) -> None:
    """Nothing of it was ever heard live: its low numbers are no echo of what was replayed."""
    engine = await fed.start()
    for idx in range(3):
        await engine.publish(blocks(idx, 1), lost=True)
    await fed.listens()
    await eventually(lambda: fed.holds(3))
    engine.restart()
    await engine.publish(blocks(0, 2))
    await eventually(lambda: fed.holds(2))


async def test_a_restart_that_shows_as_a_gap_starts_empty(fed: Fed) -> None:
    """The new life has told more than the old one before it is heard: nothing old is kept."""
    engine = await fed.start()
    await fed.listens()
    await engine.publish(blocks(0, 4))
    await eventually(lambda: fed.holds(4))
    engine.restart()
    await engine.publish(blocks(0, 1), lost=True)
    await engine.publish(removed([99]), lost=True)
    await engine.publish(blocks(1, 1))
    await eventually(lambda: fed.holds(2))


async def test_what_was_replayed_and_comes_live_too_is_taken_once(fed: Fed) -> None:
    """Published while the replay ran: the same message, no new life."""
    engine = await fed.start()
    await engine.publish(blocks(0, 1), lost=True)
    await engine.publish(blocks(1, 1), lost=True)
    await fed.listens()
    await eventually(lambda: fed.holds(2))
    await engine.repeat(1)
    await engine.publish(blocks(2, 1))
    await eventually(lambda: fed.holds(3))
    assert (engine.num_replays, fed.gaps) == (1, 0)


async def test_a_new_life_of_the_worker_is_another_replica(fed: Fed) -> None:
    """What the engine still has is its now; the old one's blocks are gone."""
    engine = await fed.start()
    await engine.publish(blocks(0, 2))
    await eventually(lambda: fed.holds(2))
    fed.worker.worker.incarnation = 2
    await eventually(lambda: fed.holds(2, ReplicaKey("w1", 2)))
    assert await fed.store.num_blocks(MODEL, W1) == 0


async def test_a_busy_engine_keeps_its_lease_and_a_new_life_is_noticed(fed: Fed) -> None:
    """Messages that change nothing and never stop must not keep the feed from looking up."""
    engine = await fed.start()
    await engine.publish(blocks(0, 2))
    await eventually(lambda: fed.holds(2))

    async def chatter() -> None:
        while True:
            await engine.publish(removed([99]))
            await asyncio.sleep(0.02)

    busy = asyncio.create_task(chatter())
    try:
        lease_ms = (await fed.store.registry())["w1"].lease_unix_ms

        async def is_prolonged() -> bool:
            return (await fed.store.registry())["w1"].lease_unix_ms > lease_ms + 500

        await eventually(is_prolonged)
        fed.worker.worker.incarnation = 2
        await eventually(lambda: fed.holds(2, ReplicaKey("w1", 2)))
    finally:
        await cancel_and_wait(busy)


async def test_an_engine_takes_no_more_than_its_share_of_the_index(redis) -> None:
    """The oldest blocks make room; writing it whole again does not exceed the share either."""
    limits = StoreLimits(lease_s=5, blocks_ttl_s=60, max_stream_len=1000, max_total_blocks=4)
    store = Store(redis, IndexKeys(), limits)
    async with AsyncExitStack() as stack:
        fed = Fed(store, stack)
        engine = await fed.start()
        await fed.listens()
        await engine.publish(blocks(0, 4))
        await eventually(lambda: fed.holds(4))
        await engine.publish(blocks(4, 1))

        async def holds_the_newest() -> bool:
            gpu = (await store.membership(MODEL, W1, HASHES))[0]
            return gpu == [False, False, True, True, True, False, False, False]

        await eventually(holds_the_newest)
        await engine.publish(removed([5]))
        await eventually(lambda: _holds_total(store, 2))


async def _holds_total(store: Store, count: int) -> bool:
    return await store.num_blocks(MODEL, W1) == count


async def test_lost_data_of_redis_is_written_again(fed: Fed, redis) -> None:
    """At the next renewal of the lease, without anything new from the engine."""
    engine = await fed.start()
    await engine.publish(blocks(0, 2))
    await eventually(lambda: fed.holds(2))
    await redis.flushdb()
    await eventually(lambda: fed.holds(2))


async def test_while_redis_is_away_the_state_is_kept(own_redis: LocalServer) -> None:
    """And written whole when it is back, though nobody asks the engine again."""
    limits = StoreLimits(lease_s=5, blocks_ttl_s=60, max_stream_len=1000)
    client = background_client(f"redis://127.0.0.1:{own_redis.port}/0", timeout_s=0.5)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(client.aclose)
        fed = Fed(Store(client, IndexKeys(), limits), stack)
        engine = await fed.start()
        await engine.publish(blocks(0, 1))
        await eventually(lambda: fed.holds(1))
        await fed.listens()

        async def is_whole_again() -> bool:
            with suppress(Unavailable):
                return await fed.holds(3)
            return False

        own_redis.kill()
        await engine.publish(blocks(1, 2))
        await eventually(lambda: fed.metrics.store_failures._value.get() > 0)
        own_redis.start()
        await eventually(is_whole_again)
        assert engine.num_replays == 1


def test_the_engines_file_is_checked(tmp_path: Path) -> None:
    """Every mistake is named."""
    path = tmp_path / "engines.toml"
    path.write_text('version = 1\n[[engine]]\nworker = "h:1"\nevents = "tcp://h:2"\n')
    assert load_engines_file(path)[0].worker == "h:1"
    path.write_text('version = 1\n[[engine]]\nworker = "h"\nevents = "http://h"\nrepaly = "x"\n')
    with pytest.raises(SettingsError, match=r"worker.*events.*repaly"):
        load_engines_file(path)
    assert load_engines_file(None) == ()
