"""The change feed: at once, merged for slow readers, honest about an outage."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from headrace_billing import key_store
from headrace_billing.audit import Stamp
from headrace_billing.changes import BEAT_S, MAX_PENDING_KEYS, ChangeFeed, Watcher
from headrace_billing.key_store import CreateKeyResponse
from headrace_billing.store import Database
from headrace_common.errors import Unavailable
from headrace_common.lifecycle import cancel_and_wait
from headrace_contracts.billing.v1.billing_pb2 import Change, Key


async def make_key(database: Database) -> str:
    """Create a key behind the feed's back, as another billing process would."""
    made: CreateKeyResponse = await database.write(
        lambda it: key_store.create_key(it, Key(tenant_id="acme"), Stamp(1))
    )
    return made.key.key_id


@contextlib.asynccontextmanager
async def running(feed: ChangeFeed) -> AsyncIterator[asyncio.Task[None]]:
    """Run a feed for the time of the block."""
    alive = asyncio.Event()

    async def on_alive() -> None:
        alive.set()

    task = asyncio.create_task(feed.run(on_alive))
    await asyncio.wait_for(alive.wait(), 30)
    yield task
    await cancel_and_wait(task)


async def next_keys(watcher: Watcher) -> list[str]:
    async with asyncio.timeout(30):
        while True:
            change = await watcher.next()
            if change.key_ids:
                return list(change.key_ids)


async def test_changes_of_another_process_are_told_within_a_beat(database: Database) -> None:
    """The database is the truth, not this process."""
    feed = ChangeFeed(database)
    async with running(feed):
        with feed.watch() as watcher:
            key_id = await make_key(database)
            assert await next_keys(watcher) == [key_id]


async def test_revisions_survive_a_restart(database: Database, database_url: str) -> None:
    """A watcher that comes back sees whether it missed something."""
    before = ChangeFeed(database)
    async with running(before):
        with before.watch() as watcher:
            seen = (await watcher.next()).revision
    await make_key(database)
    again = Database(database_url)
    after = ChangeFeed(again)
    async with running(after):
        with after.watch() as watcher:
            assert (await watcher.next()).revision == seen + 1
    await again.close()


async def test_a_change_does_not_wait_for_the_beat(database: Database) -> None:
    """A nudge makes the feed look now."""
    feed = ChangeFeed(database)
    async with running(feed):
        with feed.watch() as watcher:
            await watcher.next()
            await watcher.next()
            key_id = await make_key(database)
            feed.nudge()
            started_s = asyncio.get_running_loop().time()
            assert await next_keys(watcher) == [key_id]
            assert asyncio.get_running_loop().time() - started_s < BEAT_S


async def test_a_slow_reader_gets_one_merged_change() -> None:
    """And "all" instead of an endless list."""
    watcher = Watcher(1)
    await watcher.next()
    watcher.add(Change(revision=2, key_ids=["a"]))
    watcher.add(Change(revision=3, prices=True))
    watcher.add(Change(revision=4, key_ids=["b"]))
    assert await watcher.next() == Change(revision=4, key_ids=["a", "b"], prices=True)
    watcher.add(Change(revision=5, key_ids=[str(i) for i in range(MAX_PENDING_KEYS + 1)]))
    assert await watcher.next() == Change(revision=5, all_keys=True)


async def test_watchers_end_when_the_feed_does(database: Database) -> None:
    """Whoever watches must not take silence for freshness."""
    feed = ChangeFeed(database)
    with pytest.raises(Unavailable), feed.watch():
        pass
    async with running(feed) as task:
        with feed.watch() as watcher:
            await watcher.next()
            await cancel_and_wait(task)
            with pytest.raises(Unavailable):
                await watcher.next()
    with pytest.raises(Unavailable), feed.watch():
        pass
