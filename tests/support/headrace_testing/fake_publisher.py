"""A worker's side of the KV event stream, for the tests of the index and of whoever reads it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from headrace_common import blocks
from headrace_common.errors import HeadraceError
from headrace_common.lifecycle import cancel_and_wait
from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_contracts.cache_index.v1 import cache_index_pb2 as pb
from headrace_contracts.types.v1.types_pb2 import CACHE_TIER_GPU, CacheTier, HashRecipe, ReplicaRef

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["CacheIndex"]
PUBLISH = method_ref(DESCRIPTOR, "Publish", pb.PublishMessage, pb.PublishReply)
FINGERPRINT = "a model's fingerprint"
_RETRY_S = 0.05


def hello(
    replica: ReplicaRef, *, model: str = "m", next_seq: int = 1, capacity_blocks: int = 10_000
) -> pb.PublishMessage:
    """Make a Hello whose recipe is right."""
    size = blocks.BLOCK_SIZE_TOKENS
    recipe = HashRecipe(
        algorithm=blocks.ALGORITHM,
        block_size_tokens=size,
        model_fingerprint=FINGERPRINT,
        self_test=blocks.self_test(FINGERPRINT, size),
    )
    return pb.PublishMessage(
        hello=pb.Hello(
            replica=replica,
            model=model,
            recipe=recipe,
            next_seq=next_seq,
            kv_capacity_blocks=capacity_blocks,
        )
    )


def batch(seq: int, *events: pb.KvEvent) -> pb.PublishMessage:
    """Make a batch."""
    return pb.PublishMessage(batch=pb.KvEventBatch(seq=seq, events=events))


def stored(hashes: Sequence[bytes], tier: CacheTier.ValueType = CACHE_TIER_GPU) -> pb.KvEvent:
    """Make a stored event."""
    return pb.KvEvent(stored=pb.BlocksStored(block_hashes=blocks.join(hashes), tier=tier))


def removed(hashes: Sequence[bytes], tier: CacheTier.ValueType = CACHE_TIER_GPU) -> pb.KvEvent:
    """Make a removed event."""
    return pb.KvEvent(removed=pb.BlocksRemoved(block_hashes=blocks.join(hashes), tier=tier))


class FakePublisher:
    """Publishes as a worker does: reconnects, sends again what is not acknowledged, snapshots.

    Args:
        address: the cache index.
        replica: who publishes.
        model: served model.
        capacity_blocks: what it says it can hold.
    """

    def __init__(
        self, address: str, replica: ReplicaRef, model: str = "m", capacity_blocks: int = 10_000
    ) -> None:
        self.replica, self._model, self._capacity_blocks = replica, model, capacity_blocks
        self._client = SessionClient(address)
        self._log: list[pb.PublishMessage] = []
        self._fresh = asyncio.Event()
        self.acknowledged_seq = 0
        # Kept blocks, the truth; and what was asked for, for tests to look at.
        self.held: set[bytes] = set()
        self.asked: list[str] = []
        self._task = asyncio.create_task(self._run())

    def store(self, hashes: Sequence[bytes]) -> None:
        """Keep blocks and say so."""
        self.held |= set(hashes)
        self._publish(stored(hashes))

    def remove(self, hashes: Sequence[bytes]) -> None:
        """Drop blocks and say so."""
        self.held -= set(hashes)
        self._publish(removed(hashes))

    @property
    def seq(self) -> int:
        """The last batch made."""
        return len(self._log)

    @property
    def is_caught_up(self) -> bool:
        """Whether everything is acknowledged."""
        return self.acknowledged_seq == self.seq

    async def close(self) -> None:
        """Leave."""
        await cancel_and_wait(self._task)
        await self._client.close()

    def _publish(self, event: pb.KvEvent) -> None:
        self._log.append(batch(self.seq + 1, event))
        self._fresh.set()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(HeadraceError):
                await self._serve_one_connection()
            await asyncio.sleep(_RETRY_S)

    async def _serve_one_connection(self) -> None:
        async with await self._client.start(PUBLISH) as call:
            sent = self.seq
            call.send(
                hello(
                    self.replica,
                    model=self._model,
                    next_seq=sent + 1,
                    capacity_blocks=self._capacity_blocks,
                )
            )
            reading = asyncio.ensure_future(call.receive())
            waking = asyncio.ensure_future(self._fresh.wait())
            try:
                while True:
                    await asyncio.wait({reading, waking}, return_when=asyncio.FIRST_COMPLETED)
                    waking.cancel()
                    waking = asyncio.ensure_future(self._fresh.wait())
                    self._fresh.clear()
                    if reading.done():
                        reply = reading.result()
                        if reply is None:
                            return
                        reading = asyncio.ensure_future(call.receive())
                        sent = self._answer(reply, sent, call.send)
                    for message in self._log[sent:]:
                        call.send(message)
                    sent = self.seq
            finally:
                reading.cancel()
                waking.cancel()

    def _answer(self, reply: pb.PublishReply, sent: int, send: object) -> int:
        """Return the number of the last batch that need not be sent (again)."""
        kind = reply.WhichOneof("kind") or ""
        if kind == "acknowledged_seq":
            self.acknowledged_seq = reply.acknowledged_seq
            return sent
        self.asked.append(kind)
        if kind == "replay_from_seq":
            return reply.replay_from_seq - 1
        whole = pb.BlocksStored(block_hashes=blocks.join(sorted(self.held)), tier=CACHE_TIER_GPU)
        snapshot = pb.Snapshot(as_of_seq=self.seq, blocks=[whole], last=True)
        assert callable(send)
        send(pb.PublishMessage(snapshot=snapshot))
        return self.seq
