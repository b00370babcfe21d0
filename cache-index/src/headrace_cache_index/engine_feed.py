"""Reads the KV events of one engine of another make and writes them to the index as its worker's.

Who the worker is, which model it serves and how its blocks are hashed, it says itself (Describe).
Order makes it right: subscribe, replay everything the engine still has, write a snapshot, then
follow. A gap is replayed; where that is no longer possible, or the engine has started over, what
was known is forgotten and built anew from the replay: blocks may be missing then, never invented.
A message that cannot be read is passed over and counted; as a removal may be in it, what was known
before is forgotten then, too.
While Redis is away the state is kept here and written whole afterwards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from headrace_cache_index.engine_events import EngineCleared, EngineEvent, decode_batch
from headrace_cache_index.engines_file import EngineEntry
from headrace_cache_index.events import KEPT_RATIO, Change
from headrace_cache_index.metrics import CacheIndexMetrics
from headrace_cache_index.outcome import Outcome, Status
from headrace_cache_index.recipe import check_recipe
from headrace_cache_index.store import Publisher, Store
from headrace_cache_index.translation import Translator
from headrace_cache_index.zmq_source import EngineMessage, ZmqSource
from headrace_common.errors import InvalidRequest, Unavailable
from headrace_common.kv_index import ReplicaKey
from headrace_common.rpc import call_unary, method_ref, open_channel
from headrace_contracts.worker.v1 import worker_pb2
from headrace_contracts.worker.v1.worker_pb2 import DescribeRequest, DescribeResponse, ModelCard

_log = logging.getLogger(__name__)
_WORKER = worker_pb2.DESCRIPTOR.services_by_name["Worker"]
_DESCRIBE = method_ref(_WORKER, "Describe", DescribeRequest, DescribeResponse)
_DESCRIBE_TIMEOUT_S = 2.0


class EngineFeed:
    """Follows one engine.

    Args:
        engine: where it is.
        store: where its blocks go.
        metrics: what is counted.
        renew_every_s: time between two renewals of the lease.
        max_blocks: bound on what is kept of it.
    """

    def __init__(
        self,
        engine: EngineEntry,
        store: Store,
        metrics: CacheIndexMetrics,
        *,
        renew_every_s: float,
        max_blocks: int,
    ) -> None:
        self._engine, self._store, self._metrics = engine, store, metrics
        self._renew_every_s, self._max_blocks = renew_every_s, max_blocks
        self._has_told_unreadable = False

    async def follow(self) -> None:
        """Follow one life of the worker; call again for the next one.

        Raises:
            HeadraceError: the worker cannot be asked, or another publisher speaks for it.
        """
        replica, card = await self._describe()
        check_recipe(card.recipe)
        engine, self._has_told_unreadable = self._engine, False
        with ZmqSource(engine.events, engine.replay, engine.topic, self._note_unreadable) as source:
            life = _Life(
                replica,
                card,
                source,
                self._store,
                self._metrics,
                self._max_blocks,
                self._note_unreadable,
            )
            self._metrics.engines.inc()
            try:
                await life.start_over()
                renewed_at_s = time.monotonic()
                while True:
                    left_s = renewed_at_s + self._renew_every_s - time.monotonic()
                    message = await source.receive(max(0.0, left_s))
                    if message is not None:
                        await life.take(message)
                    # A busy engine never falls silent.
                    if time.monotonic() >= renewed_at_s + self._renew_every_s:
                        renewed_at_s = time.monotonic()
                        await life.renew()
                        if (await self._describe())[0] != replica:
                            return
            finally:
                self._metrics.engines.dec()

    def _note_unreadable(self, reason: str) -> None:
        """Count a message that is passed over; the first of a life is logged."""
        self._metrics.unreadable.inc()
        if not self._has_told_unreadable:
            self._has_told_unreadable = True
            _log.warning("%s: passed over: %s", self._engine.events, reason)

    async def _describe(self) -> tuple[ReplicaKey, ModelCard]:
        channel = open_channel(self._engine.worker)
        try:
            described = await call_unary(channel, _DESCRIBE, DescribeRequest(), _DESCRIBE_TIMEOUT_S)
        finally:
            await channel.close()
        if not described.models:
            raise Unavailable("The worker is still loading.", retry_after_s=1.0)
        return ReplicaKey.of(described.replica), described.models[0]


class _Life:
    """One life of a worker whose engine is followed."""

    def __init__(
        self,
        replica: ReplicaKey,
        card: ModelCard,
        source: ZmqSource,
        store: Store,
        metrics: CacheIndexMetrics,
        max_blocks: int,
        on_unreadable: Callable[[str], None],
    ) -> None:
        self._source, self._store, self._metrics = source, store, metrics
        self._on_unreadable = on_unreadable
        self._publisher = Publisher(replica, card.model, max_blocks)
        recipe = card.recipe
        self._translator = Translator(
            recipe.model_fingerprint,
            recipe.block_size_tokens,
            max_blocks,
            windows_declared=bool(recipe.window_tokens),
        )
        # The engine's numbers: the next one to apply, and the last one that came live.
        self._next, self._last_live = 0, -1
        # Digests of those applied that may come once more: the replayed ones, or else the last one.
        # Another message of the same number comes from another life of the engine.
        self._applied: dict[int, int] = {}
        # Ours, in the index; and whether the index must be written whole.
        self._seq, self._is_behind = 0, True

    async def start_over(self) -> None:
        """Build everything anew from what the engine still has."""
        self._translator.clear()
        self._next = 0
        self._applied.clear()
        for message in await self._source.replay(0):
            self._translate(message)
        self._is_behind = True
        await self._write_whole()

    async def take(self, message: EngineMessage) -> None:
        """Take in a live message, and what is missing before it."""
        is_restarted = message.number <= self._last_live or (
            message.number < self._next and not self._was_applied(message)
        )
        self._last_live = message.number
        if is_restarted:
            _log.warning("%s: the engine has started over", self._publisher.replica)
            await self.start_over()
        elif message.number > self._next:
            self._metrics.engine_gaps.inc()
            await self._fill_gap()
        if message.number < self._next:
            # Came with a replay before.
            return
        if message.number > self._next:
            # What is missing is gone for good, removals too: nothing known before can be trusted.
            self._translator.clear()
            self._is_behind = True
        self._applied.clear()
        await self._write(message)

    async def renew(self) -> None:
        """Keep the lease; find out whether the index has lost what it was told."""
        if self._is_behind:
            await self._write_whole()
            return
        try:
            outcome = await self._store.renew(self._publisher)
        except Unavailable:
            self._metrics.store_failures.inc()
            return
        self._check(outcome)
        if self._is_behind:
            await self._write_whole()

    async def _fill_gap(self) -> None:
        last = self._next - 1
        missed = await self._source.replay(max(0, last))
        if missed and missed[0].number == last:
            is_same_life = self._was_applied(missed.pop(0))
        else:
            is_same_life = not missed or missed[0].number == self._next
        if not is_same_life:
            _log.warning("%s: what was missed cannot be filled in", self._publisher.replica)
            await self.start_over()
            return
        for message in missed:
            await self._write(message)

    async def _write(self, message: EngineMessage) -> None:
        change = self._translate(message)
        if self._is_behind:
            await self._write_whole()
        elif change.cleared or change.tiers():
            try:
                self._check(await self._store.apply(self._publisher, [change]))
            except Unavailable:
                self._metrics.store_failures.inc()
                self._is_behind = True
            if self._is_behind:
                await self._write_whole()

    def _translate(self, message: EngineMessage) -> Change:
        left_out = self._translator.num_left_out
        events: list[EngineEvent]
        try:
            events = decode_batch(message.payload)
        except ValueError as error:
            self._on_unreadable(str(error))
            # A removal may have been in it: nothing known before can be trusted.
            self._is_behind, events = True, [EngineCleared()]
        change = self._translator.apply(events, self._seq + 1)
        self._metrics.engine_left_out.inc(self._translator.num_left_out - left_out)
        self._next = message.number + 1
        self._applied[message.number] = hash(message.payload)
        return change

    def _was_applied(self, message: EngineMessage) -> bool:
        return self._applied.get(message.number) == hash(message.payload)

    async def _write_whole(self) -> None:
        """Register and write a snapshot; tried again later while Redis is away."""
        try:
            known = await self._store.register(self._publisher)
            self._check(known)
            limit = await self._store.limit_blocks(self._publisher)
            if self._translator.num_told() > limit:
                self._translator.shrink(int(limit * KEPT_RATIO))
            whole = self._translator.snapshot(max(known.seq, self._seq) + 1)
            self._is_behind = False
            self._check(await self._store.replace(self._publisher, whole))
        except Unavailable:
            self._metrics.store_failures.inc()
            self._is_behind = True

    def _check(self, outcome: Outcome) -> None:
        if outcome.status is Status.SUPERSEDED:
            raise InvalidRequest(f"{self._publisher.replica}: a newer incarnation is registered.")
        if outcome.status in (Status.LOST, Status.GAP, Status.OVERFLOW):
            self._is_behind = True
        else:
            self._seq = max(self._seq, outcome.seq)
