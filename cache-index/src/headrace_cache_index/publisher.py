"""One publisher's stream: reads it without stopping, writes to the store, answers.

A reader task keeps the stream flowing into a bounded inbox. While the store is down nothing is
acknowledged; once the inbox is full, batches are dropped and asked for again later, so a slow store
costs the worker nothing. Parts of a snapshot are never dropped: they wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TypeVar

from headrace_cache_index.events import Change, Gate, Replacement
from headrace_cache_index.metrics import CacheIndexMetrics
from headrace_cache_index.outcome import Outcome, Status
from headrace_cache_index.store import Publisher, Store
from headrace_common.errors import InvalidRequest, Unavailable
from headrace_common.lifecycle import cancel_and_wait
from headrace_contracts.cache_index.v1.cache_index_pb2 import (
    KvEventBatch,
    PublishMessage,
    PublishReply,
)

_log = logging.getLogger(__name__)
_MAX_INBOX = 1024
# Batches applied in one round trip.
_MAX_PIPELINE = 64
_RETRY_S = 0.2
T = TypeVar("T")


class _Inbox:
    """Messages that wait for the store; drops batches when it is full."""

    def __init__(self) -> None:
        self._messages: deque[PublishMessage] = deque()
        self._changed = asyncio.Event()
        self.has_dropped = False
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._messages)

    def first(self) -> PublishMessage:
        return self._messages[0]

    def pop(self) -> None:
        self._messages.popleft()
        self._changed.set()

    async def fill(self, messages: AsyncIterator[PublishMessage]) -> None:
        """Read to the end of the stream."""
        try:
            async for message in messages:
                if message.HasField("snapshot"):
                    while len(self._messages) >= _MAX_INBOX:
                        await self.wait()
                elif self.has_dropped or len(self._messages) >= _MAX_INBOX:
                    # What follows a dropped batch is asked for again together with it; kept, it
                    # would only take the place of the answer.
                    self.has_dropped = True
                    continue
                self._messages.append(message)
                self._changed.set()
        finally:
            self.is_closed = True
            self._changed.set()

    async def wait(self) -> None:
        """Wait until something came or went."""
        self._changed.clear()
        await self._changed.wait()


class PublisherStream:
    """Serves one publisher until it leaves.

    Args:
        publisher: who it is, checked.
        gate: its state machine.
        store: where changes go.
        metrics: what is counted.
        renew_every_s: time between two renewals of the lease.
    """

    def __init__(
        self,
        publisher: Publisher,
        gate: Gate,
        store: Store,
        metrics: CacheIndexMetrics,
        renew_every_s: float,
    ) -> None:
        self.publisher, self.gate = publisher, gate
        self._store, self._metrics, self._renew_every_s = store, metrics, renew_every_s
        self._inbox = _Inbox()
        self._has_told_unreadable = False

    async def serve(
        self, messages: AsyncIterator[PublishMessage], next_seq: int
    ) -> AsyncGenerator[PublishReply, None]:
        """Answer the Hello, then every message.

        Raises:
            InvalidRequest: the stream or a snapshot is malformed, or a newer incarnation has come.
        """
        outcome = await self._until_up(lambda: self._store.register(self.publisher))
        self._refuse_superseded(outcome)
        known_seq = outcome.seq if outcome.status is Status.KNOWN else None
        yield self._counted(self.gate.open(next_seq, known_seq))
        reader = asyncio.create_task(self._inbox.fill(messages))
        try:
            while self._inbox or not self._inbox.is_closed:
                for reply in await self._turn():
                    yield self._counted(reply)
            await reader
        finally:
            await cancel_and_wait(reader)

    async def _turn(self) -> list[PublishReply]:
        """Handle what is there; if nothing comes, renew the lease."""
        if self._inbox:
            return await self._drain_inbox()
        if self._inbox.has_dropped:
            self._inbox.has_dropped = False
            return _some(self.gate.messages_dropped())
        try:
            async with asyncio.timeout(self._renew_every_s):
                await self._inbox.wait()
        except TimeoutError:
            return await self._renew()
        return []

    async def _drain_inbox(self) -> list[PublishReply]:
        replies: list[PublishReply] = []
        changes: list[Change] = []
        while self._inbox and len(changes) < _MAX_PIPELINE:
            message = self._inbox.first()
            kind = message.WhichOneof("kind")
            if kind == "snapshot" and changes:
                break
            self._inbox.pop()
            if kind == "snapshot":
                return replies + await self._take_snapshot(message)
            if kind != "batch":
                raise InvalidRequest("After the Hello only batches and snapshots may follow.")
            taken = self._taken(message.batch)
            if isinstance(taken, Change):
                changes.append(taken)
            else:
                replies += _some(taken)
        if changes:
            replies += await self._apply(changes)
        return replies

    def _taken(self, batch: KvEventBatch) -> Change | PublishReply | None:
        try:
            return self.gate.take_batch(batch)
        except InvalidRequest as error:
            self._metrics.unreadable.inc()
            if not self._has_told_unreadable:
                self._has_told_unreadable = True
                _log.warning("%s: batch %d: %s", self.publisher.replica, batch.seq, error)
            return self.gate.unreadable()

    async def _apply(self, changes: list[Change]) -> list[PublishReply]:
        outcome = await self._until_up(lambda: self._store.apply(self.publisher, changes))
        self._metrics.batches.inc(len(changes))
        if outcome.status is Status.APPLIED:
            return [self.gate.applied(outcome.seq)]
        return await self._recover(outcome)

    async def _take_snapshot(self, message: PublishMessage) -> list[PublishReply]:
        limit = await self._until_up(lambda: self._store.limit_blocks(self.publisher))
        self.gate.limit_blocks = limit
        taken = self.gate.take_snapshot(message.snapshot)
        if not isinstance(taken, Replacement):
            return _some(taken)
        outcome = await self._until_up(lambda: self._store.replace(self.publisher, taken))
        if outcome.status is Status.APPLIED:
            self._metrics.snapshots.inc()
            return [self.gate.replaced(outcome.seq)]
        return await self._recover(outcome)

    async def _renew(self) -> list[PublishReply]:
        try:
            outcome = await self._store.renew(self.publisher)
        except Unavailable:
            self._metrics.store_failures.inc()
            return []
        if outcome.status is not Status.APPLIED:
            return await self._recover(outcome)
        if outcome.seq < self.gate.seq:
            # Redis came back with an older state of itself.
            return [self.gate.fell_back(outcome.seq)]
        return _some(self.gate.ask_again())

    async def _recover(self, outcome: Outcome) -> list[PublishReply]:
        """Find out what is missing and ask for it."""
        self._refuse_superseded(outcome)
        _log.warning("%s: the index is %s", self.publisher.replica, outcome.status)
        if outcome.status is Status.LOST:
            outcome = await self._until_up(lambda: self._store.register(self.publisher))
            self._refuse_superseded(outcome)
        if outcome.status in (Status.NEW, Status.OVERFLOW):
            return [self.gate.base_lost(outcome.seq)]
        return [self.gate.fell_back(outcome.seq)]

    def _refuse_superseded(self, outcome: Outcome) -> None:
        if outcome.status is Status.SUPERSEDED:
            raise InvalidRequest(f"{self.publisher.replica}: a newer incarnation is registered.")

    async def _until_up(self, write: Callable[[], Awaitable[T]]) -> T:
        """Write, again and again while the store is down. Writes are idempotent."""
        while True:
            try:
                return await write()
            except Unavailable:
                self._metrics.store_failures.inc()
                await asyncio.sleep(_RETRY_S)

    def _counted(self, reply: PublishReply) -> PublishReply:
        self._metrics.replies.labels(reply.WhichOneof("kind") or "").inc()
        return reply


def _some(reply: PublishReply | None) -> list[PublishReply]:
    return [] if reply is None else [reply]
