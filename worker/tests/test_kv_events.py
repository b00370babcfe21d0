"""KV publisher: whatever breaks, the index ends up with exactly what the worker holds."""

import asyncio
import contextlib

import pytest

from headrace_common.blocks import split
from headrace_common.errors import Unavailable
from headrace_common.metrics import new_registry
from headrace_common.rpc_server import RpcServer
from headrace_contracts.cache_index.v1 import cache_index_pb2 as pb
from headrace_contracts.types.v1.types_pb2 import CACHE_TIER_GPU, ReplicaRef
from headrace_testing.waiting import eventually, free_port
from headrace_worker.engine.block_events import BlockEventLog
from headrace_worker.kv_events import KvPublisher
from headrace_worker.metrics import WorkerMetrics

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["CacheIndex"]
HELLO = pb.Hello(replica=ReplicaRef(worker_id="w", incarnation=1), model="m")


class Index:
    """A cache-index in memory that can forget, ask and fail."""

    def __init__(self):
        self.held = set()
        self.last_seq = 0
        self.hellos = []
        self.snapshots = 0
        self.fail_at_seq = None
        self.acknowledges = True

    async def Publish(self, requests, _call):  # noqa: N802 - contract name
        first = await anext(requests)
        self.hellos.append(first.hello.next_seq)
        if first.hello.next_seq > self.last_seq + 1:
            yield pb.PublishReply(replay_from_seq=self.last_seq + 1)
        async for message in requests:
            for reply in self.apply(message):
                yield reply

    def apply(self, message):
        if message.HasField("snapshot"):
            self.take_snapshot(message.snapshot)
        elif message.batch.seq <= self.last_seq:
            pass
        elif message.batch.seq > self.last_seq + 1:
            return [pb.PublishReply(snapshot_wanted=True)]
        else:
            if self.fail_at_seq == message.batch.seq:
                self.fail_at_seq = None
                raise Unavailable("Redis is away")
            self.take_batch(message.batch)
        return [pb.PublishReply(acknowledged_seq=self.last_seq)] if self.acknowledges else []

    def take_snapshot(self, snapshot):
        if not self.snapshots or self.part_of != snapshot.as_of_seq:
            self.held, self.part_of = set(), snapshot.as_of_seq
            self.snapshots += 1
        for stored in snapshot.blocks:
            self.held |= set(split(stored.block_hashes))
        if snapshot.last:
            self.last_seq = snapshot.as_of_seq

    def take_batch(self, batch):
        self.last_seq = batch.seq
        for event in batch.events:
            if event.HasField("stored"):
                assert event.stored.tier == CACHE_TIER_GPU
                self.held |= set(split(event.stored.block_hashes))
            elif event.HasField("removed"):
                self.held -= set(split(event.removed.block_hashes))
            else:
                self.held = set()

    async def Lookup(self, _request, _call):  # noqa: N802 - contract name
        return pb.LookupResponse()

    async def GetStats(self, _request, _call):  # noqa: N802 - contract name
        return pb.GetStatsResponse()


def block(number: int) -> bytes:
    return number.to_bytes(16, "big")


def store(log: BlockEventLog, *numbers: int) -> None:
    log.stored([block(number) for number in numbers])
    log.flush()


@contextlib.asynccontextmanager
async def serving(index, address="127.0.0.1:0"):
    server = RpcServer(address, [(DESCRIPTOR, index)])
    await server.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def publishing(address, log):
    publisher = KvPublisher(address, HELLO, log, WorkerMetrics(new_registry()))
    task = asyncio.create_task(publisher.run())
    try:
        yield publisher
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def agrees(index, log):
    seq, hashes = log.snapshot()
    return index.last_seq == seq and index.held == set(hashes)


@pytest.fixture
def log():
    return BlockEventLog(num_kept=8)


async def test_batches_arrive_as_they_happen(log):
    """Stored, removed and cleared are followed; all is acknowledged."""
    index = Index()
    async with serving(index) as address, publishing(address, log) as publisher:
        store(log, 1, 2)
        await eventually(lambda: agrees(index, log))
        log.removed(block(2))
        store(log, 3)
        await eventually(lambda: agrees(index, log))
        log.cleared()
        log.flush()
        await eventually(lambda: agrees(index, log) and publisher.acknowledged_seq == 3)
    assert index.hellos == [1]
    assert index.snapshots == 0


async def test_what_was_stored_before_the_connection_is_sent_too(log):
    """The worker never waits for the index."""
    store(log, 1)
    index = Index()
    async with serving(index) as address, publishing(address, log):
        await eventually(lambda: agrees(index, log))


async def test_after_a_break_the_rest_is_sent_again(log):
    """An index that failed in the middle gets what it did not acknowledge."""
    index = Index()
    index.fail_at_seq = 2
    async with serving(index) as address, publishing(address, log):
        store(log, 1)
        store(log, 2)
        store(log, 3)
        await eventually(lambda: agrees(index, log))
    assert len(index.hellos) == 2


async def test_survives_an_index_that_restarts_empty(log):
    """Hello again; the index asks for what it lacks; what is no longer kept comes as a snapshot."""
    address = f"127.0.0.1:{free_port()}"
    first, second = Index(), Index()
    async with publishing(address, log):
        async with serving(first, address):
            for number in range(20):
                store(log, number)
            await eventually(lambda: agrees(first, log))
        store(log, 100)
        async with serving(second, address):
            await eventually(lambda: agrees(second, log))
            store(log, 101)
            await eventually(lambda: agrees(second, log))
    assert second.hellos[0] > 1
    assert second.snapshots == 1


async def test_a_snapshot_is_sent_when_wanted(log):
    """An index that sees a gap asks, and is whole again."""
    index = Index()
    async with serving(index) as address, publishing(address, log):
        store(log, 1)
        await eventually(lambda: agrees(index, log))
        index.last_seq = -5
        store(log, 2)
        await eventually(lambda: index.snapshots == 1 and agrees(index, log))


async def test_a_huge_snapshot_comes_in_parts(log):
    """More blocks than fit one message."""
    store(log, *range(9000))
    for number in range(9000, 9010):
        store(log, number)
    index = Index()
    async with serving(index) as address, publishing(address, log):
        await eventually(lambda: agrees(index, log))


async def test_a_silent_index_bounds_what_is_sent():
    """Without acknowledgements at most a window of batches is under way; the log goes on."""
    log, index = BlockEventLog(), Index()
    index.acknowledges = False
    async with serving(index) as address, publishing(address, log):
        for number in range(600):
            store(log, number)
        await eventually(lambda: index.last_seq == 256)
        await asyncio.sleep(0.05)
        assert index.last_seq == 256
        assert log.last_seq == 600
