"""The CacheIndex servicer."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing

from headrace_cache_index.events import Gate
from headrace_cache_index.metrics import CacheIndexMetrics
from headrace_cache_index.publisher import PublisherStream
from headrace_cache_index.recipe import check_recipe
from headrace_cache_index.store import Publisher, Store
from headrace_common.clock import Clock
from headrace_common.errors import InvalidRequest
from headrace_common.kv_index import ReplicaKey, shorten
from headrace_common.rpc import Call
from headrace_contracts.cache_index.v1.cache_index_pb2 import (
    GetStatsRequest,
    GetStatsResponse,
    Hello,
    LookupRequest,
    LookupResponse,
    PublishMessage,
    PublishReply,
)

_log = logging.getLogger(__name__)


class CacheIndexServicer:
    """Takes publishers' events and answers questions about the index.

    Args:
        store: the index in Redis.
        clock: for patience with publishers.
        metrics: what is counted.
        renew_every_s: time between two renewals of a connected publisher's lease.
        max_blocks_per_replica: bound on what one replica may hold, whatever it says of itself.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        metrics: CacheIndexMetrics,
        *,
        renew_every_s: float,
        max_blocks_per_replica: int,
    ) -> None:
        self._store, self._clock, self._metrics = store, clock, metrics
        self._renew_every_s = renew_every_s
        self._max_blocks = max_blocks_per_replica
        self._streams: dict[ReplicaKey, PublisherStream] = {}

    async def Publish(  # noqa: N802 - contract name
        self, requests: AsyncIterator[PublishMessage], _call: Call
    ) -> AsyncIterator[PublishReply]:
        """Serve one worker's event stream."""
        first = await anext(requests, None)
        if first is None or not first.HasField("hello"):
            raise InvalidRequest("A publisher begins with its Hello.", param="hello")
        publisher = self._check(first.hello)
        gate = Gate(publisher.capacity_blocks, self._clock)
        stream = PublisherStream(publisher, gate, self._store, self._metrics, self._renew_every_s)
        self._streams[publisher.replica] = stream
        self._metrics.publishers.inc()
        try:
            async with aclosing(stream.serve(requests, first.hello.next_seq)) as replies:
                async for reply in replies:
                    yield reply
        finally:
            self._metrics.publishers.dec()
            if self._streams.get(publisher.replica) is stream:
                del self._streams[publisher.replica]

    async def Lookup(self, request: LookupRequest, _call: Call) -> LookupResponse:  # noqa: N802 - contract name
        """Count the leading blocks that each replica of the model holds."""
        try:
            chain = shorten(request.block_hashes)
        except ValueError as error:
            raise InvalidRequest(str(error), param="block_hashes") from error
        response = LookupResponse()
        for worker_id, entry in sorted((await self._store.registry()).items()):
            if entry.model != request.model:
                continue
            replica = ReplicaKey(worker_id, entry.incarnation)
            tiers = await self._store.membership(entry.model, replica, chain)
            anywhere = [any(held) for held in zip(*tiers, strict=True)]
            response.hits.add(
                replica=replica.to_ref(), blocks=_leading(anywhere), gpu_blocks=_leading(tiers[0])
            )
        return response

    async def GetStats(self, _request: GetStatsRequest, _call: Call) -> GetStatsResponse:  # noqa: N802 - contract name
        """Tell each replica's size and health."""
        response = GetStatsResponse()
        for worker_id, entry in sorted((await self._store.registry()).items()):
            replica = ReplicaKey(worker_id, entry.incarnation)
            stream = self._streams.get(replica)
            response.replicas.add(
                replica=replica.to_ref(),
                num_blocks=await self._store.num_blocks(entry.model, replica),
                last_seq=entry.seq,
                num_gaps=stream.gate.num_gaps if stream else 0,
                connected=stream is not None,
            )
        return response

    def _check(self, hello: Hello) -> Publisher:
        if not hello.replica.worker_id or not hello.replica.incarnation:
            raise InvalidRequest("A Hello names its worker and incarnation.", param="replica")
        if not hello.model:
            raise InvalidRequest("A Hello names its model.", param="model")
        try:
            check_recipe(hello.recipe)
        except InvalidRequest as error:
            self._metrics.refused.inc()
            _log.error("refused %s: %s", hello.replica.worker_id, error.public_message)
            raise
        capacity = min(hello.kv_capacity_blocks or self._max_blocks, self._max_blocks)
        return Publisher(ReplicaKey.of(hello.replica), hello.model, capacity)


def _leading(held: list[bool]) -> int:
    return next((depth for depth, is_held in enumerate(held) if not is_held), len(held))
