"""A cache index without Redis: the whole contract in one dict, for workers' tests.

    async with FakeCacheIndexServer() as server:
        worker publishes to server.address
        assert server.index.blocks("w1") == {...}

The same conformance suite runs against it and the real service
(tests/contract/test_cache_index_conformance.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from headrace_common import blocks
from headrace_common.errors import InvalidRequest
from headrace_common.lifecycle import cancel_and_wait
from headrace_common.rpc import Call
from headrace_common.rpc_server import RpcServer
from headrace_contracts.cache_index.v1 import cache_index_pb2 as pb
from headrace_contracts.types.v1.types_pb2 import CACHE_TIER_GPU, ReplicaRef

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["CacheIndex"]


@dataclass
class Held:
    """What is known of the live incarnation of one worker."""

    hello: pb.Hello
    seq: int = 0
    num_gaps: int = 0
    # Whole 16-byte hashes, by tier.
    blocks: dict[int, set[bytes]] = field(default_factory=dict)
    # Replies of the connected stream; None = not connected.
    replies: asyncio.Queue[pb.PublishReply | Exception | None] | None = None
    waits_for_replay: bool = False
    waits_for_snapshot: bool = False
    staged: dict[int, set[bytes]] = field(default_factory=dict)

    def ask_for_snapshot(self) -> None:
        """Forget everything and ask the publisher for it."""
        self.blocks, self.staged = {}, {}
        self.waits_for_snapshot = True
        self.reply(pb.PublishReply(snapshot_wanted=True))

    def ask_for_replay(self) -> None:
        """Ask for the batches after the last one held."""
        self.waits_for_replay = True
        self.reply(pb.PublishReply(replay_from_seq=self.seq + 1))

    def reply(self, reply: pb.PublishReply) -> None:
        """Send to the publisher, if it is there."""
        if self.replies is not None:
            self.replies.put_nowait(reply)


class FakeCacheIndex:
    """CacheIndex servicer in memory."""

    def __init__(self) -> None:
        # By worker id; for tests to look at.
        self.workers: dict[str, Held] = {}
        # Every message taken, Hellos included.
        self.messages: list[pb.PublishMessage] = []

    def blocks(self, worker_id: str, tier: int = CACHE_TIER_GPU) -> set[bytes]:
        """Return the whole hashes that a worker holds on one tier."""
        held = self.workers.get(worker_id)
        return set(held.blocks.get(tier, ())) if held else set()

    def lose_everything(self) -> None:
        """Do as the real index does when Redis lost its data."""
        for held in self.workers.values():
            held.seq = 0
            held.ask_for_snapshot()

    async def Publish(  # noqa: N802 - contract name
        self, requests: AsyncIterator[pb.PublishMessage], _call: Call
    ) -> AsyncIterator[pb.PublishReply]:
        """Serve one worker's event stream."""
        first = await anext(requests, None)
        if first is None or not first.HasField("hello"):
            raise InvalidRequest("A publisher begins with its Hello.", param="hello")
        self.messages.append(first)
        _check(first.hello)
        held = self._register(first.hello)
        replies = held.replies = asyncio.Queue()
        self._greet(held, first.hello.next_seq)
        reader = asyncio.create_task(self._read(requests, held, replies))
        try:
            while (reply := await replies.get()) is not None:
                if isinstance(reply, Exception):
                    raise reply
                yield reply
        finally:
            if held.replies is replies:
                held.replies = None
            await cancel_and_wait(reader)

    async def Lookup(self, request: pb.LookupRequest, _call: Call) -> pb.LookupResponse:  # noqa: N802 - contract name
        """Count the leading blocks that each replica of the model holds."""
        chain = _split(request.block_hashes)
        response = pb.LookupResponse()
        for _, held in sorted(self.workers.items()):
            if held.hello.model == request.model:
                everywhere = set().union(*held.blocks.values())
                response.hits.add(
                    replica=held.hello.replica,
                    blocks=_leading(chain, everywhere),
                    gpu_blocks=_leading(chain, held.blocks.get(CACHE_TIER_GPU, set())),
                )
        return response

    async def GetStats(self, _request: pb.GetStatsRequest, _call: Call) -> pb.GetStatsResponse:  # noqa: N802 - contract name
        """Tell each replica's size and health."""
        response = pb.GetStatsResponse()
        for _, held in sorted(self.workers.items()):
            response.replicas.add(
                replica=held.hello.replica,
                num_blocks=sum(len(hashes) for hashes in held.blocks.values()),
                last_seq=held.seq,
                num_gaps=held.num_gaps,
                connected=held.replies is not None,
            )
        return response

    def _register(self, hello: pb.Hello) -> Held:
        held = self.workers.get(hello.replica.worker_id)
        if held is not None and held.hello.replica.incarnation > hello.replica.incarnation:
            raise InvalidRequest("A newer incarnation is registered.")
        if held is None or held.hello.replica.incarnation != hello.replica.incarnation:
            held = self.workers[hello.replica.worker_id] = Held(hello)
            held.waits_for_snapshot = hello.next_seq > 1
        return held

    @staticmethod
    def _greet(held: Held, next_seq: int) -> None:
        if held.waits_for_snapshot:
            held.ask_for_snapshot()
        elif next_seq > held.seq + 1:
            held.ask_for_replay()
        else:
            held.reply(pb.PublishReply(acknowledged_seq=held.seq))

    async def _read(
        self,
        requests: AsyncIterator[pb.PublishMessage],
        held: Held,
        replies: asyncio.Queue[pb.PublishReply | Exception | None],
    ) -> None:
        try:
            async for message in requests:
                self.messages.append(message)
                if self.workers.get(held.hello.replica.worker_id) is not held:
                    raise InvalidRequest("A newer incarnation is registered.")
                _take(held, message)
            replies.put_nowait(None)
        except InvalidRequest as error:
            replies.put_nowait(error)


def _take(held: Held, message: pb.PublishMessage) -> None:
    kind = message.WhichOneof("kind")
    if kind == "snapshot":
        _take_snapshot(held, message.snapshot)
    elif kind == "batch":
        _take_batch(held, message.batch)
    else:
        raise InvalidRequest("After the Hello only batches and snapshots may follow.")


def _take_batch(held: Held, batch: pb.KvEventBatch) -> None:
    if batch.seq <= held.seq:
        held.reply(pb.PublishReply(acknowledged_seq=held.seq))
    elif held.waits_for_snapshot:
        return
    elif batch.seq > held.seq + 1:
        if not held.waits_for_replay:
            held.num_gaps += 1
            held.ask_for_replay()
    else:
        try:
            for event in batch.events:
                _apply(held, event)
        except InvalidRequest:
            held.num_gaps += 1
            held.ask_for_snapshot()
            return
        held.seq, held.waits_for_replay = batch.seq, False
        held.reply(pb.PublishReply(acknowledged_seq=held.seq))


def _apply(held: Held, event: pb.KvEvent) -> None:
    match event.WhichOneof("kind"):
        case "stored":
            tier, hashes = _tier(event.stored), _split(event.stored.block_hashes)
            held.blocks.setdefault(tier, set()).update(hashes)
        case "removed":
            tier, hashes = _tier(event.removed), _split(event.removed.block_hashes)
            held.blocks.setdefault(tier, set()).difference_update(hashes)
        case "cleared":
            held.blocks = {}
        case _:
            raise InvalidRequest("An event of an unknown kind.", param="batch.events")


def _take_snapshot(held: Held, part: pb.Snapshot) -> None:
    for stored in part.blocks:
        held.staged.setdefault(_tier(stored), set()).update(_split(stored.block_hashes))
    if part.last:
        held.blocks, held.staged = held.staged, {}
        held.seq, held.waits_for_snapshot, held.waits_for_replay = part.as_of_seq, False, False
        held.reply(pb.PublishReply(acknowledged_seq=held.seq))


def _check(hello: pb.Hello) -> None:
    recipe = hello.recipe
    if hello.replica == ReplicaRef() or not hello.model:
        raise InvalidRequest("A Hello names its worker, incarnation and model.")
    if recipe.algorithm != blocks.ALGORITHM or not recipe.block_size_tokens:
        raise InvalidRequest("The recipe of the block hashes differs.", param="recipe")
    wanted = blocks.self_test(recipe.model_fingerprint, recipe.block_size_tokens)
    if recipe.self_test != wanted:
        raise InvalidRequest("The self-test of the block hashes differs.", param="recipe.self_test")


def _tier(event: pb.BlocksStored | pb.BlocksRemoved) -> int:
    if not event.tier:
        raise InvalidRequest("Every event names its tier.", param="tier")
    return int(event.tier)


def _split(joined: bytes) -> list[bytes]:
    try:
        return blocks.split(joined)
    except ValueError as error:
        raise InvalidRequest(str(error), param="block_hashes") from error


def _leading(chain: list[bytes], held: set[bytes]) -> int:
    return next((depth for depth, one in enumerate(chain) if one not in held), len(chain))


class FakeCacheIndexServer:
    """A fake cache index behind a real `RpcServer` on a free port; an async context manager."""

    def __init__(self, index: FakeCacheIndex | None = None, address: str = "127.0.0.1:0") -> None:
        self.index = index or FakeCacheIndex()
        self._server = RpcServer(address, [(DESCRIPTOR, self.index)])

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self._server.port}"

    async def __aenter__(self) -> FakeCacheIndexServer:
        await self._server.start()
        await self._server.set_ready(True)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._server.stop(0)
