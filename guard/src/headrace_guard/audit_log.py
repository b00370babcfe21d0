"""The audit at work: takes records down at once, writes, publishes and compares them behind.

::

    note() -> queue -> writer (one thread, SQLite) -> Kafka guard.audit.v1
                                '-> a SENT record, after a grace period: leak_in(its request)
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from headrace_common.clock import Clock, unix_us
from headrace_common.kafka_client import GUARD_AUDIT_TOPIC, ensure_topics, producer, stop
from headrace_common.lifecycle import cancel_and_wait, supervise
from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_guard.audit_journal import AuditJournal
from headrace_guard.metrics import AuditMetrics
from headrace_guard.reconcile import Leak, leak_in

_log = logging.getLogger(__name__)
_BATCH = 512
_SEND_TIMEOUT_S = 10.0
_FLUSH_S = 5.0
_LOOK_EVERY_S = 0.5

P = ParamSpec("P")
T = TypeVar("T")


class AuditLog:
    """Belongs to one event loop; the journal is used on one thread of its own.

    Args:
        journal: where records are kept; closed here.
        clock: time of records.
        metrics: what became of records.
        kafka_bootstrap: brokers; empty = records stay in the journal.
        topic_replicas: see `ensure_topics`.
        max_waiting: records that may wait to be written.
        sent_grace_s: how long after a gateway's report the output's own record may come.
    """

    def __init__(
        self,
        journal: AuditJournal,
        clock: Clock,
        metrics: AuditMetrics,
        *,
        kafka_bootstrap: str,
        topic_replicas: int = 0,
        max_waiting: int,
        sent_grace_s: float,
    ) -> None:
        self._journal, self._clock, self._metrics = journal, clock, metrics
        self._bootstrap, self._max_waiting = kafka_bootstrap, max_waiting
        self._topic_replicas = topic_replicas
        self._sent_grace_s = sent_grace_s
        self._waiting: deque[pb.AuditRecord] = deque()
        # Requests of which an output's record was dropped, the last of them.
        self._dropped: deque[str] = deque(maxlen=max_waiting)
        # Request ids with the time from which they may be compared.
        self._reported: deque[tuple[float, str]] = deque()
        self._filled, self._written = asyncio.Event(), asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "audit")
        self._tasks: list[asyncio.Task[None]] = []

    def note(self, record: pb.AuditRecord) -> None:
        """Take a record down; never waits. Beyond the bound it is lost, and counted."""
        if len(self._waiting) >= self._max_waiting:
            self._metrics.dropped.inc()
            if record.kind == pb.AUDIT_KIND_OUTPUT:
                self._dropped.append(record.request_id)
            return
        record.unix_us = unix_us(self._clock)
        self._waiting.append(record)
        self._filled.set()

    def start(self) -> None:
        """Begin to write, publish and compare."""
        bodies = [("audit journal", self._write_all), ("audit comparison", self._compare_all)]
        if self._bootstrap:
            bodies.append(("audit topic", self._publish_all))
        self._tasks = [asyncio.create_task(supervise(name, body)) for name, body in bodies]

    async def close(self) -> None:
        """Write what waits, within bounds and as far as the disk takes it; close the journal."""
        try:
            async with asyncio.timeout(_FLUSH_S):
                while self._waiting:
                    await self._write_batch()
        except (TimeoutError, sqlite3.Error) as error:
            _log.error("%d audit records are lost: %r", len(self._waiting), error)
            self._metrics.dropped.inc(len(self._waiting))
        await cancel_and_wait(*self._tasks)
        await self._on_thread(self._journal.close)
        self._thread.shutdown()

    async def find(self, request_id: str) -> list[pb.AuditRecord]:
        """Return all records of one request that are written, oldest first."""
        return await self._on_thread(self._journal.find, request_id)

    async def verify(self) -> tuple[int, list[str]]:
        """Recount the chain."""
        return await self._on_thread(self._journal.verify)

    async def _write_all(self) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._waiting:
                await self._write_batch()

    async def _write_batch(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
        try:
            await self._on_thread(self._journal.append, batch)
        except BaseException:
            self._waiting.extendleft(reversed(batch))
            self._filled.set()
            raise
        self._metrics.records.inc(len(batch))
        self._metrics.waiting.set(len(self._waiting))
        due_s = self._clock.now_s() + self._sent_grace_s
        for record in batch:
            if record.kind == pb.AUDIT_KIND_SENT:
                self._reported.append((due_s, record.request_id))
        self._written.set()

    async def _compare_all(self) -> None:
        while True:
            while self._reported and self._reported[0][0] <= self._clock.now_s():
                _, request_id = self._reported.popleft()
                records = await self.find(request_id)
                leak = leak_in(records)
                if leak is Leak.LEAK and request_id in self._dropped:
                    leak = leak_in(records, has_lost=True)
                if leak is not None:
                    self._alarm(leak, request_id)
            await asyncio.sleep(_LOOK_EVERY_S)

    def _alarm(self, leak: Leak, request_id: str) -> None:
        self._metrics.unscanned.labels(leak.value).inc()
        level = logging.ERROR if leak is Leak.LEAK else logging.WARNING
        _log.log(
            level, "%s: more text went out than the guard released (%s)", request_id, leak.value
        )

    async def _publish_all(self) -> None:
        async with asyncio.timeout(_SEND_TIMEOUT_S):
            await ensure_topics(self._bootstrap, [GUARD_AUDIT_TOPIC], self._topic_replicas)
        kafka = producer(self._bootstrap, f"guard-{self._journal.chain_id}")
        try:
            async with asyncio.timeout(_SEND_TIMEOUT_S):
                await kafka.start()
            while True:
                batch = await self._on_thread(self._journal.unpublished, _BATCH)
                self._metrics.unpublished.set(len(batch))
                if not batch:
                    await self._written.wait()
                    self._written.clear()
                    continue
                async with asyncio.timeout(_SEND_TIMEOUT_S):
                    acks = [
                        await kafka.send(
                            GUARD_AUDIT_TOPIC,
                            record.SerializeToString(deterministic=True),
                            key=record.request_id.encode(),
                        )
                        for record in batch
                    ]
                    await asyncio.gather(*acks)
                await self._on_thread(self._journal.mark_published, batch[-1].seq)
        finally:
            await stop(kafka)

    async def _on_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await asyncio.shield(
            loop.run_in_executor(self._thread, lambda: work(*args, **kwargs))
        )
