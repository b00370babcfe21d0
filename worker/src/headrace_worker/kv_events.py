"""Tells the cache-index which blocks this worker holds. Never in the engine's way.

One call for as long as the index lives. The worker says Hello with the number of the next batch,
then sends batches as they come; the index acknowledges what is durable and may ask for a replay or
a snapshot. After a break everything not acknowledged is sent again, or a snapshot if it is no
longer kept. Batches are numbered, so nothing is applied twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from headrace_common.blocks import join
from headrace_common.lifecycle import cancel_and_wait, supervise
from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_common.session_call import SessionCall
from headrace_contracts.cache_index.v1 import cache_index_pb2 as pb
from headrace_contracts.types.v1.types_pb2 import CACHE_TIER_GPU
from headrace_worker.engine.block_events import Batch, BlockEventLog, Cleared, Event, Stored
from headrace_worker.metrics import WorkerMetrics

_PUBLISH = method_ref(
    pb.DESCRIPTOR.services_by_name["CacheIndex"],
    "Publish",
    pb.PublishMessage,
    pb.PublishReply,
)
# Batches sent and not acknowledged; the receiver keeps at most 1,024 unread messages.
_WINDOW = 256
_SNAPSHOT_PART_BLOCKS = 4096

_PublishCall = SessionCall[pb.PublishMessage, pb.PublishReply]


class KvPublisher:
    """Publishes one worker life's cache changes.

    Args:
        address: host:port of the cache-index.
        hello: who publishes; `next_seq` is filled in here.
        log: the changes.
        metrics: counts batches, snapshots and breaks.
    """

    def __init__(
        self, address: str, hello: pb.Hello, log: BlockEventLog, metrics: WorkerMetrics
    ) -> None:
        self._client = SessionClient(address)
        self._hello, self._log, self._metrics = hello, log, metrics
        self._acknowledged_seq = 0
        self._next_seq = 1
        self._snapshot_wanted = False
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Publish until cancelled; a break is retried for ever."""
        loop = asyncio.get_running_loop()
        self._log.subscribe(_threadsafe(loop, self._wake.set))
        try:
            await supervise(
                "publishing KV events",
                self._publish,
                max_delay_s=2.0,
                on_failure=self._metrics.kv_publish_failures.inc,
            )
        finally:
            await self._client.close()

    @property
    def acknowledged_seq(self) -> int:
        """Last batch that the index has made durable."""
        return self._acknowledged_seq

    async def _publish(self) -> None:
        async with await self._client.start(_PUBLISH) as call:
            self._next_seq = self._acknowledged_seq + 1
            hello = pb.Hello()
            hello.CopyFrom(self._hello)
            hello.next_seq = self._next_seq
            call.send(pb.PublishMessage(hello=hello))
            reader = asyncio.create_task(self._read(call))
            try:
                while not reader.done():
                    self._send(call)
                    await self._wait(reader)
                # Raises what ended the call.
                reader.result()
            finally:
                await cancel_and_wait(reader)

    async def _wait(self, reader: asyncio.Task[None]) -> None:
        """Wait for new batches, for replies, or for the end of the call."""
        waking = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait({waking, reader}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waking.cancel()
        self._wake.clear()

    async def _read(self, call: _PublishCall) -> None:
        while (reply := await call.receive()) is not None:
            match reply.WhichOneof("kind"):
                case "acknowledged_seq":
                    self._acknowledged_seq = max(self._acknowledged_seq, reply.acknowledged_seq)
                case "replay_from_seq":
                    self._next_seq = reply.replay_from_seq
                    self._acknowledged_seq = min(self._acknowledged_seq, self._next_seq - 1)
                case "snapshot_wanted":
                    self._snapshot_wanted = True
            self._wake.set()

    def _send(self, call: _PublishCall) -> None:
        batches = None if self._snapshot_wanted else self._log.since(self._next_seq)
        if batches is None:
            self._send_snapshot(call)
            batches = self._log.since(self._next_seq) or []
        room = self._acknowledged_seq + _WINDOW - self._next_seq + 1
        for batch in batches[: max(0, room)]:
            call.send(pb.PublishMessage(batch=_batch(batch)))
            self._next_seq = batch.seq + 1
            self._metrics.kv_batches.inc()

    def _send_snapshot(self, call: _PublishCall) -> None:
        as_of_seq, hashes = self._log.snapshot()
        for part in _snapshot(as_of_seq, hashes):
            call.send(pb.PublishMessage(snapshot=part))
        self._snapshot_wanted = False
        self._next_seq = as_of_seq + 1
        # What came before is part of the snapshot; it opens the window anew.
        self._acknowledged_seq = as_of_seq
        self._metrics.kv_snapshots.inc()


def _snapshot(as_of_seq: int, hashes: list[bytes]) -> Iterator[pb.Snapshot]:
    starts = range(0, len(hashes), _SNAPSHOT_PART_BLOCKS) or range(1)
    for start in starts:
        part = hashes[start : start + _SNAPSHOT_PART_BLOCKS]
        yield pb.Snapshot(
            as_of_seq=as_of_seq,
            blocks=[pb.BlocksStored(block_hashes=join(part), tier=CACHE_TIER_GPU)],
            last=start == starts[-1],
        )


def _batch(batch: Batch) -> pb.KvEventBatch:
    return pb.KvEventBatch(seq=batch.seq, events=map(_event, batch.events))


def _event(event: Event) -> pb.KvEvent:
    if isinstance(event, Cleared):
        return pb.KvEvent(cleared=pb.AllCleared())
    joined = join(event.block_hashes)
    if isinstance(event, Stored):
        return pb.KvEvent(stored=pb.BlocksStored(block_hashes=joined, tier=CACHE_TIER_GPU))
    return pb.KvEvent(removed=pb.BlocksRemoved(block_hashes=joined, tier=CACHE_TIER_GPU))


def _threadsafe(
    loop: asyncio.AbstractEventLoop, callback: Callable[[], None]
) -> Callable[[], None]:
    """Wrap *callback* so that any thread may call it; after the loop's end it does nothing."""

    def call() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(callback)

    return call
