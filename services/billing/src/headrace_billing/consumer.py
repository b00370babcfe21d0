"""Reads the usage log into the books.

No consumer group of the broker's: which partitions this process reads (`shares.py`) and where it
stands lie in the ledger's own database, checked and moved in the transaction that books the
messages. A crash at any point therefore neither loses nor repeats a booking.

A log can begin anew (a broker that keeps it in memory was restarted). So whenever the broker went
away the reading starts one message before its place, and goes on only if that message is the one
that was read there. If it is not, or the log's end lies before the place, that partition is read
from its beginning; what was booked before is known by its primary key. Events that were in the lost
log only are sent again by the gateways' outboxes, which keep whatever `FindMissing` calls missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.structs import ConsumerRecord
from sqlalchemy import Connection, select
from sqlalchemy.exc import SQLAlchemyError

from headrace_billing import schema
from headrace_billing.bookkeeper import BatchResult, Bookkeeper
from headrace_billing.broker_watch import BrokerWatch
from headrace_billing.deliveries import Delivery
from headrace_billing.metrics import BillingMetrics
from headrace_billing.shares import Shares
from headrace_billing.store import Database
from headrace_common import kafka_client
from headrace_common.clock import Clock
from headrace_common.errors import Unavailable

_log = logging.getLogger(__name__)

MAX_BATCH_MESSAGES = 2000
_POLL_MS = 200
_CHECK_INTERVAL_S = 1.0
_BROKER_TIMEOUT_S = 10.0
_FIRST_RETRY_S, _MAX_RETRY_S = 0.1, 5.0


class LogChangedError(Exception):
    """The log is not the one that was being read; connect anew."""


class ShareChangedError(Exception):
    """Other partitions are this process's now; place anew."""


@dataclass(frozen=True)
class Position:
    """Where a partition is to be read on, and what was read just before."""

    next_offset: int
    last_sha256: bytes


class UsageConsumer:
    """The loop between the log and the books.

    ::

        connect -> share -> place -> (poll -> book)* -> [any failure] -> connect ...

    Args:
        bootstrap_servers: the brokers.
        database: where the books are.
        clock: time.
        metrics: where to count.
        consumer_id: see `Shares`; drawn if not given.
        exports: see `Bookkeeper`.
        topic_replicas: see `ensure_topics`.
        topics: those of `WorkerUsage` and of `UsageEvent`.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        database: Database,
        clock: Clock,
        metrics: BillingMetrics,
        *,
        consumer_id: str = "",
        exports: bool = False,
        topic_replicas: int = 0,
        topics: tuple[str, str] = (kafka_client.WORKER_USAGE_TOPIC, kafka_client.USAGE_TOPIC),
    ) -> None:
        self._bootstrap_servers, self._topic_replicas = bootstrap_servers, topic_replicas
        self._database = database
        self._clock = clock
        self._metrics = metrics
        # In this order in each batch: a witness is there before the close that may need it.
        self._topics = topics
        self.bookkeeper = Bookkeeper(topics[0], exports=exports)
        self.shares = Shares(database, consumer_id or secrets.token_hex(8), clock)
        # All there are, and which of them this process reads.
        self._all_partitions: list[TopicPartition] = []
        # Where the log was before and has not been seen to be the same log yet.
        self._expected: dict[TopicPartition, Position] = {}
        self._begins: dict[TopicPartition, int] = {}
        self._ends: dict[TopicPartition, int] = {}
        self._caught_up_since_s: float | None = None

    def caught_up_for_s(self) -> float:
        """Return for how long nothing unread has been in the log; 0 = something is, or unknown."""
        if self._caught_up_since_s is None:
            return 0.0
        return self._clock.now_s() - self._caught_up_since_s

    async def run(self) -> None:
        """Read and book until something fails or the task is cancelled.

        Raises:
            Exception: whatever failed; calling again goes on where the books stand.
        """
        async with asyncio.timeout(_BROKER_TIMEOUT_S):
            await kafka_client.ensure_topics(
                self._bootstrap_servers, list(self._topics), self._topic_replicas
            )
        async with BrokerWatch(self._bootstrap_servers) as watch:
            consumer = kafka_client.consumer(self._bootstrap_servers, "headrace-billing")
            try:
                async with asyncio.timeout(_BROKER_TIMEOUT_S):
                    await consumer.start()
                    self._all_partitions = await self._partitions(consumer)
                partitions = await self._share()
                async with asyncio.timeout(_BROKER_TIMEOUT_S):
                    consumer.assign(partitions)
                    await self._place(consumer, partitions)
                await self._loop(consumer, partitions, watch)
            finally:
                self._caught_up_since_s = None
                self._metrics.consumer_lag_messages.set(math.nan)
                await kafka_client.stop(consumer)

    async def release(self) -> None:
        """Let the partitions go, at the end of the process."""
        with contextlib.suppress(Unavailable):
            await self.shares.release()

    async def _share(self) -> list[TopicPartition]:
        """Take this process's share; wait while others have everything."""
        epochs = await self.shares.take(self._all_partitions)
        while not epochs:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            epochs = await self.shares.renew(self._all_partitions, 0.0)
        return [TopicPartition(*it) for it in sorted(epochs)]

    async def _partitions(self, consumer: AIOKafkaConsumer) -> list[TopicPartition]:
        await consumer.topics()
        found = [
            TopicPartition(topic, partition)
            for topic in self._topics
            for partition in sorted(consumer.partitions_for_topic(topic) or ())
        ]
        if {it.topic for it in found} != set(self._topics):
            raise LogChangedError("a topic is missing")
        return found

    async def _place(self, consumer: AIOKafkaConsumer, partitions: list[TopicPartition]) -> None:
        """Put every partition where the books stand, one message earlier to compare it."""
        stored = await self._database.read(read_positions)
        self._begins = await consumer.beginning_offsets(partitions)
        self._expected, self._ends = {}, {}
        for partition in partitions:
            begin = self._begins[partition]
            position = stored.get((partition.topic, partition.partition))
            if position is not None and position.next_offset > begin:
                self._expected[partition] = position
                consumer.seek(partition, position.next_offset - 1)
                continue
            if position is not None and position.next_offset < begin:
                _log.error("%s: messages before %d expired unread", partition, begin)
            consumer.seek(partition, begin)

    def _restart(self, consumer: AIOKafkaConsumer, partition: TopicPartition) -> None:
        _log.warning("%s began anew, reading it from its beginning", partition)
        self._metrics.log_restarts.inc()
        consumer.seek(partition, self._begins[partition])

    async def _loop(
        self, consumer: AIOKafkaConsumer, partitions: list[TopicPartition], watch: BrokerWatch
    ) -> None:
        next_check_s = self._clock.now_s()
        while True:
            batch = await consumer.getmany(timeout_ms=_POLL_MS, max_records=MAX_BATCH_MESSAGES)
            if watch.is_broken:
                raise LogChangedError("the broker went away")
            deliveries = self._deliveries(consumer, batch)
            if deliveries:
                await self._book(deliveries)
            self._watch_ends(consumer, partitions)
            if self._clock.now_s() >= next_check_s:
                await self._check(consumer, partitions)
                await watch.refresh()
                await self._renew(partitions)
                next_check_s = self._clock.now_s() + _CHECK_INTERVAL_S

    def _deliveries(
        self, consumer: AIOKafkaConsumer, batch: dict[TopicPartition, list[ConsumerRecord]]
    ) -> list[Delivery]:
        deliveries: list[Delivery] = []
        for partition, records in batch.items():
            read = [_delivery(record) for record in records]
            expected = self._expected.pop(partition, None) if read else None
            if expected is not None and read[0].offset == expected.next_offset - 1:
                if read[0].fingerprint != expected.last_sha256:
                    self._restart(consumer, partition)
                    continue
                read = read[1:]
            deliveries += read
        return sorted(deliveries, key=lambda it: self._topics.index(it.topic))

    def _watch_ends(self, consumer: AIOKafkaConsumer, partitions: list[TopicPartition]) -> None:
        """Compare each log's end, as the last fetch told it, with what was known of it.

        Fetches tell the end right with every broker; Tansu's answer to ListOffsets is too low.

        Raises:
            LogChangedError: a log that was being read became shorter.
        """
        for partition in partitions:
            end = consumer.highwater(partition)
            if end is None:
                continue
            expected = self._expected.get(partition)
            if expected is not None and end < expected.next_offset:
                del self._expected[partition]
                self._restart(consumer, partition)
            elif end < self._ends.get(partition, 0):
                raise LogChangedError(f"{partition} became shorter")
            self._ends[partition] = end

    async def _book(self, deliveries: Sequence[Delivery]) -> None:
        """Book a batch, however long the database is away."""
        started_s, now_unix_s = self._clock.now_s(), int(self._clock.unix_s())
        try:
            result = await self._write(lambda it: self._book_share(it, deliveries, now_unix_s))
        except SQLAlchemyError as error:
            if len(deliveries) > 1:
                # One of them is refused by the database itself: find it.
                for delivery in deliveries:
                    await self._book([delivery])
                return
            _log.warning("%s is refused by the database: %s", deliveries[0], error)
            text = f"refused by the database: {error}"
            result = await self._write(lambda it: self._bury(it, deliveries[0], text, now_unix_s))
        self._metrics.count(result, "log")
        self._metrics.batch_duration_s.observe(self._clock.now_s() - started_s)

    def _book_share(
        self, connection: Connection, deliveries: Sequence[Delivery], now_unix_s: int
    ) -> BatchResult:
        self.shares.check(connection, {(it.topic, it.partition) for it in deliveries})
        return self.bookkeeper.book_batch(connection, deliveries, now_unix_s)

    def _bury(
        self, connection: Connection, delivery: Delivery, error: str, now_unix_s: int
    ) -> BatchResult:
        self.shares.check(connection, [(delivery.topic, delivery.partition)])
        return self.bookkeeper.bury(connection, delivery, error, now_unix_s)

    async def _write(self, work: Callable[[Connection], BatchResult]) -> BatchResult:
        delay_s = _FIRST_RETRY_S
        while True:
            try:
                return await self._database.write(work)
            except Unavailable:
                self._metrics.failures.labels("database").inc()
                self._caught_up_since_s = None
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, _MAX_RETRY_S)

    async def _renew(self, partitions: Sequence[TopicPartition]) -> None:
        epochs = await self.shares.renew(self._all_partitions, self.caught_up_for_s())
        if set(epochs) != set(partitions):
            raise ShareChangedError(f"{len(epochs)} partitions now, {len(partitions)} before")

    async def _check(self, consumer: AIOKafkaConsumer, partitions: list[TopicPartition]) -> None:
        """Measure the lag. Fails when the broker is gone, which fetches would not tell."""
        async with asyncio.timeout(_BROKER_TIMEOUT_S):
            await consumer.end_offsets(partitions)
        if len(self._ends) < len(partitions):
            return
        positions = {it: await consumer.position(it) for it in partitions}
        lag = sum(max(0, self._ends[it] - positions[it]) for it in partitions)
        self._metrics.consumer_lag_messages.set(lag)
        if lag:
            self._caught_up_since_s = None
        elif self._caught_up_since_s is None:
            self._caught_up_since_s = self._clock.now_s()


def read_positions(connection: Connection) -> dict[tuple[str, int], Position]:
    """Return where the books stand in the log."""
    return {
        (row.topic, row.partition): Position(row.next_offset, row.last_sha256)
        for row in connection.execute(select(schema.log_positions))
    }


def _delivery(record: ConsumerRecord) -> Delivery:
    return Delivery(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        value=record.value or b"",
        timestamp_ms=record.timestamp,
    )
