"""The Router servicer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from headrace_common.clock import Clock
from headrace_common.errors import InvalidRequest, NotFound
from headrace_common.kv_index import ReplicaKey, chain_ints
from headrace_common.rpc import Call
from headrace_contracts.router.v1.router_pb2 import (
    Decision,
    GetDecisionRequest,
    PickMessage,
    PickRequest,
    Replica,
    ReplicaList,
    WatchReplicasRequest,
)
from headrace_router import replicas
from headrace_router.candidate import STANDARD, Query
from headrace_router.decisions import RecentDecisions, to_message
from headrace_router.dispatcher import Dispatcher
from headrace_router.replicas import ReplicaTable

# Load alone is told to watchers this often at most; everything else at once.
_LOAD_INTERVAL_S = 1.0


class RouterServicer:
    """Picks replicas.

    Args:
        dispatcher: queues and picks.
        table: the replicas.
        decisions: where decisions are remembered.
        clock: time.
        index_staleness_s: age of the index.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        table: ReplicaTable,
        decisions: RecentDecisions,
        clock: Clock,
        index_staleness_s: Callable[[], float],
    ) -> None:
        self._dispatcher, self._table, self._decisions = dispatcher, table, decisions
        self._clock, self._index_staleness_s = clock, index_staleness_s
        self._watchers: set[asyncio.Event] = set()
        self._is_stopping = False
        table.on_change(self._wake_watchers)

    async def Pick(  # noqa: N802 - contract name
        self, requests: AsyncIterator[PickMessage], call: Call
    ) -> AsyncIterator[Decision]:
        """Decide, then take progress until the call ends; its end gives the load back."""
        first = await anext(requests, None)
        if first is None or not first.HasField("pick"):
            raise InvalidRequest("A pick begins with its request.", param="pick")
        query = _query(first.pick)
        ticket = self._dispatcher.submit(query, call.time_left_s())
        try:
            choice = await ticket.picked
            decision = to_message(
                query,
                choice,
                queue_s=ticket.queue_s,
                index_staleness_s=self._index_staleness_s(),
            )
            self._decisions.add(decision)
            yield decision
            async for message in requests:
                if not message.HasField("progress"):
                    raise InvalidRequest("After the request only progress may follow.")
                ticket.progress(message.progress)
        finally:
            ticket.close()

    async def WatchReplicas(  # noqa: N802 - contract name
        self, _request: WatchReplicasRequest, _call: Call
    ) -> AsyncIterator[ReplicaList]:
        """Send the replica list at once and at each change, until the router stops."""
        woken = asyncio.Event()
        self._watchers.add(woken)
        try:
            while not self._is_stopping:
                woken.clear()
                version, sent_at_s = self._table.version, self._clock.now_s()
                yield self._list()
                await woken.wait()
                while self._table.version == version and not self._is_stopping:
                    left_s = sent_at_s + _LOAD_INTERVAL_S - self._clock.now_s()
                    if left_s <= 0:
                        break
                    woken.clear()
                    try:
                        async with asyncio.timeout(left_s):
                            await woken.wait()
                    except TimeoutError:
                        break
        finally:
            self._watchers.discard(woken)

    def end_watches(self) -> None:
        """End all watches and those to come: a stop would otherwise wait for them in vain."""
        self._is_stopping = True
        self._wake_watchers()

    async def GetDecision(self, request: GetDecisionRequest, _call: Call) -> Decision:  # noqa: N802 - contract name
        """Tell why a recent request went where it went."""
        decision = self._decisions.get(request.request_id)
        if decision is None:
            raise NotFound("No such decision is remembered.", param="request_id")
        return decision

    def _list(self) -> ReplicaList:
        return ReplicaList(
            version=self._table.version,
            replicas=[_message(one) for one in self._table.all()],
            has_undescribed_models=self._table.has_undescribed_models(),
        )

    def _wake_watchers(self) -> None:
        for woken in self._watchers:
            woken.set()


def _query(request: PickRequest) -> Query:
    if not request.request_id or not request.model:
        raise InvalidRequest("A pick names its request and model.", param="request_id")
    try:
        chain = chain_ints(request.block_hashes)
    except ValueError as error:
        raise InvalidRequest(str(error), param="block_hashes") from error
    if chain and not request.block_size_tokens:
        raise InvalidRequest("Block hashes come with their size.", param="block_size_tokens")
    if len(chain) * request.block_size_tokens > max(request.prompt_tokens, 1):
        raise InvalidRequest("More blocks than the prompt has tokens.", param="block_hashes")
    return Query(
        request_id=request.request_id,
        model=request.model,
        chain=chain,
        block_size_tokens=request.block_size_tokens,
        prompt_tokens=max(request.prompt_tokens, 1),
        expected_output_tokens=request.expected_output_tokens,
        priority=request.priority or STANDARD,
        excluded=frozenset(ReplicaKey.of(ref) for ref in request.excluded),
        tenant_id=request.tenant_id,
        session_id=request.session_id,
        ttft_goal_s=request.ttft_slo_ms / 1000,
    )


def _message(one: replicas.Replica) -> Replica:
    return Replica(
        replica=one.key.to_ref(),
        address=one.address,
        state=one.state,
        reachable=one.is_heard,
        models=one.cards,
        load=one.report,
        role=one.role,
    )
