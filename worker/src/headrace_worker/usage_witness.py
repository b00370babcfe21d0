"""Sends the worker's own count of each request to Kafka: a second witness beside the gateway's.

In the background and bounded: while Kafka is away records wait in memory; beyond the bound the
oldest are dropped and counted. The ledger does not depend on them, it compares with them.
"""

from __future__ import annotations

import asyncio
from collections import deque

from headrace_common.kafka_client import WORKER_USAGE_TOPIC, ensure_topics, producer, stop
from headrace_common.lifecycle import supervise
from headrace_contracts.usage.v1.usage_pb2 import WorkerUsage
from headrace_worker.metrics import WorkerMetrics

MAX_WAITING = 4096
_BATCH = 256
_SEND_TIMEOUT_S = 10.0


class UsageWitness:
    """Queue and sender of usage records. Belongs to one event loop.

    Args:
        bootstrap_servers: Kafka.
        client_id: name of this worker.
        metrics: counts what was sent and dropped.
        topic_replicas: see `ensure_topics`.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        client_id: str,
        metrics: WorkerMetrics,
        topic_replicas: int = 0,
    ) -> None:
        self._bootstrap_servers, self._client_id = bootstrap_servers, client_id
        self._topic_replicas = topic_replicas
        self._metrics = metrics
        self._waiting: deque[WorkerUsage] = deque()
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_waiting(self) -> int:
        """Records not yet taken by Kafka."""
        return len(self._waiting)

    def record(self, usage: WorkerUsage) -> None:
        """Queue a record; never blocks."""
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self._metrics.usage_dropped.inc()
        self._waiting.append(usage)
        self._empty.clear()
        self._filled.set()

    async def run(self) -> None:
        """Send until cancelled; a failure is retried for ever."""
        await supervise("sending usage records", self._send_all)

    async def flush(self, within_s: float) -> None:
        """Give waiting records a last chance, while `run` goes on."""
        try:
            async with asyncio.timeout(within_s):
                await self._empty.wait()
        except TimeoutError:
            self._metrics.usage_dropped.inc(len(self._waiting))

    async def _send_all(self) -> None:
        await ensure_topics(self._bootstrap_servers, [WORKER_USAGE_TOPIC], self._topic_replicas)
        kafka = producer(self._bootstrap_servers, self._client_id)
        try:
            await kafka.start()
            while True:
                await self._filled.wait()
                self._filled.clear()
                while self._waiting:
                    batch = [self._waiting[idx] for idx in range(min(_BATCH, len(self._waiting)))]
                    async with asyncio.timeout(_SEND_TIMEOUT_S):
                        sent = [
                            await kafka.send(
                                WORKER_USAGE_TOPIC,
                                usage.SerializeToString(),
                                key=usage.request_id.encode(),
                            )
                            for usage in batch
                        ]
                        await asyncio.gather(*sent)
                    self._forget(batch)
        finally:
            # What a failed attempt left is tried again with the next producer.
            self._filled.set()
            await stop(kafka)

    def _forget(self, batch: list[WorkerUsage]) -> None:
        """Take sent records off the queue; some may have been dropped from its front meanwhile."""
        sent = {id(usage) for usage in batch}
        while self._waiting and id(self._waiting[0]) in sent:
            self._waiting.popleft()
        if not self._waiting:
            self._empty.set()
        self._metrics.usage_sent.inc(len(batch))
